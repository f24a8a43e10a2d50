// What the errno of a registration means on this machine: EFAULT alone is misleading.
//
// Layer: rdma.
#pragma once

#include <string>

#include "rdma/device_info.h"
#include "rdma/span.h"

namespace mk::rdma {

// "8192 bytes at 0x7f0000001000 on mlx5_0: 0x7f0000002000 is not mapped in this process". Examines
// the limits and mappings of this process.
std::string explain_registration(int error, const DeviceInfo& device, Span span, bool writable);

}  // namespace mk::rdma
