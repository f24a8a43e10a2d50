#include "transfer/memory/nic_gpus.h"

#include <set>

#include "common/check.h"
#include "rdma/gpu_memory.h"
#include "transfer/base/error.h"

namespace mk::transfer {

void flush_gpus(const std::vector<RegionRef>& regions) {
  std::set<int> devices;
  for (const RegionRef& region : regions) {
    if (region->device >= 0 && region->on_nics) devices.insert(region->device);
  }
  try {
    for (const int device : devices) rdma::flush_writes(device);
  } catch (const std::exception& error) {
    throw Refused(ErrorReason(error.what(), FailureKind::kDevice));
  }
}

}  // namespace mk::transfer
