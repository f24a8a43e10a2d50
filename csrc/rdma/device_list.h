// RAII handles: the list of NICs that libibverbs finds, and an open NIC.
//
// Layer: rdma.
#pragma once

#include <memory>

#include "rdma/error.h"
#include "rdma/verbs.h"

namespace mk::rdma {

class DeviceList {
 public:
  // Empty if the kernel has no RDMA support.
  DeviceList() : devices_(Verbs::get().p_ibv_get_device_list(&count_)) {
    if (devices_) return;
    count_ = 0;
    if (errno != ENOSYS) throw SystemError(errno, "ibv_get_device_list");
  }
  DeviceList(const DeviceList&) = delete;
  ~DeviceList() {
    if (devices_) Verbs::get().p_ibv_free_device_list(devices_);
  }

  bool empty() const { return count_ == 0; }
  ibv_device** begin() const { return devices_; }
  ibv_device** end() const { return devices_ + count_; }

 private:
  int count_ = 0;
  ibv_device** devices_;
};

struct CloseContext {
  void operator()(ibv_context* context) const { Verbs::get().p_ibv_close_device(context); }
};
using ContextHandle = std::unique_ptr<ibv_context, CloseContext>;

}  // namespace mk::rdma
