// Device: an open NIC and its protection domain.
//
//   auto device = Device::open("mlx5_0");
//   while (auto event = device->wait_event(0.1)) ...   // "PORT_ERR", port 1
//
// Layer: rdma. Thread-safe.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "common/fd.h"
#include "rdma/device_info.h"
#include "rdma/resource.h"
#include "rdma/verbs.h"

namespace mk::rdma {

// An asynchronous event of the device.
struct AsyncEvent {
  std::string type;     // verbs.h's name without the prefix: "PORT_ERR", "QP_FATAL", "DEVICE_FATAL"
  int port = 0;         // of port events
  uint32_t qp_num = 0;  // of events of a queue pair
};

class Device final : public Resource {
 public:
  // Throws InvalidArgument (no such device), Unavailable (no libibverbs), SystemError.
  static std::shared_ptr<Device> open(const std::string& name);
  // Uses a protection domain of another library, which must keep it open for longer than this.
  static std::shared_ptr<Device> borrow(ibv_context* context, ibv_pd* pd);

  Device(ibv_context* context, ibv_pd* pd, bool owns);  // for make_resource
  ~Device() override { close(); }

  const std::string& name() const { return info_.name; }
  const DeviceInfo& info() const { return info_; }  // as of when it was opened
  PortInfo port(int number) const;                  // as of now

  // The next event; empty at the timeout, or at once if the device is closed meanwhile. On a
  // borrowed device, events are left to its owner.
  std::optional<AsyncEvent> wait_event(double timeout_s);

  // The caller must hold a Use, or be creating a child.
  ibv_context* context() const { return context_; }
  ibv_pd* pd() const { return pd_; }

 private:
  void release() noexcept override;
  void interrupt() noexcept override;

  ibv_context* context_;
  ibv_pd* pd_;
  const bool owns_;
  DeviceInfo info_;
  Fd leave_;  // an eventfd: readable once the device is being closed
};

}  // namespace mk::rdma
