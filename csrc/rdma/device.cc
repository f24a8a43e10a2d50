#include "rdma/device.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <cstring>

#include "rdma/device_list.h"
#include "rdma/error.h"
#include "rdma/wait.h"

namespace mk::rdma {
namespace {

const char* event_name(ibv_event_type type) {
  static const char* const names[] = {
      "CQ_ERR",       "QP_FATAL",     "QP_REQ_ERR", "QP_ACCESS_ERR",
      "COMM_EST",     "SQ_DRAINED",   "PATH_MIG",   "PATH_MIG_ERR",
      "DEVICE_FATAL", "PORT_ACTIVE",  "PORT_ERR",   "LID_CHANGE",
      "PKEY_CHANGE",  "SM_CHANGE",    "SRQ_ERR",    "SRQ_LIMIT_REACHED",
      "QP_LAST_WQE",  "CLIENT_REREG", "GID_CHANGE", "WQ_FATAL"};
  return type >= 0 && type <= IBV_EVENT_WQ_FATAL ? names[type] : "UNKNOWN";
}

AsyncEvent describe(const ibv_async_event& event) {
  AsyncEvent described{event_name(event.event_type)};
  switch (event.event_type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_COMM_EST:
    case IBV_EVENT_SQ_DRAINED:
    case IBV_EVENT_PATH_MIG:
    case IBV_EVENT_PATH_MIG_ERR:
    case IBV_EVENT_QP_LAST_WQE_REACHED:
      described.qp_num = event.element.qp->qp_num;
      break;
    case IBV_EVENT_PORT_ACTIVE:
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_PKEY_CHANGE:
    case IBV_EVENT_SM_CHANGE:
    case IBV_EVENT_CLIENT_REREGISTER:
    case IBV_EVENT_GID_CHANGE:
      described.port = event.element.port_num;
      break;
    default:  // of the device or a completion queue: nothing to add
      break;
  }
  return described;
}

std::string names_of(const DeviceList& devices) {
  std::string names;
  for (ibv_device* device : devices) {
    names += concat(names.empty() ? "" : ", ", Verbs::get().p_ibv_get_device_name(device));
  }
  return names;
}

// After a fork(), kernels before 5.12 give this process other pages for the registered memory that
// it writes to, and the NIC stays with the old ones. The library can keep that memory from
// children, which it would do on later kernels as well, and then refuse memory that madvise(2)
// does. It is too late once something was registered by others.
void init_fork() {
  static const bool once = [] {
    const bool is_needed = !VerbsForkStatus::reason().empty() ||
                           VerbsForkStatus::get().p_ibv_is_fork_initialized() != IBV_FORK_UNNEEDED;
    if (is_needed && VerbsFork::reason().empty()) VerbsFork::get().p_ibv_fork_init();
    return true;
  }();
  static_cast<void>(once);
}

}  // namespace

std::shared_ptr<Device> Device::open(const std::string& name) {
  const Verbs& verbs = Verbs::get();
  init_fork();
  const DeviceList devices;
  for (ibv_device* device : devices) {
    if (name != verbs.p_ibv_get_device_name(device)) continue;
    ContextHandle context(check_handle(verbs.p_ibv_open_device(device), "ibv_open_device", name));
    ibv_pd* pd = check_handle(verbs.p_ibv_alloc_pd(context.get()), "ibv_alloc_pd", name);
    return make_resource<Device>(context.release(), pd, true);
  }
  if (devices.empty()) {
    throw Unavailable(
        concat("open: this machine has no RDMA device, got \"", name, "\" (is ib_uverbs loaded?)"));
  }
  throw InvalidArgument(concat("open: name must be an RDMA device of this machine (",
                               names_of(devices), "), got \"", name, "\""));
}

std::shared_ptr<Device> Device::borrow(ibv_context* context, ibv_pd* pd) {
  MK_CHECK(context && pd, "borrow: context and pd must be handles of verbs, got null");
  init_fork();
  return make_resource<Device>(context, pd, false);
}

Device::Device(ibv_context* context, ibv_pd* pd, bool owns)
    : Resource("device", {}), context_(context), pd_(pd), owns_(owns) {
  try {
    info_ = rdma::describe(context);
    rename(concat("device ", info_.name));
    leave_ = Fd(MK_SYSCALL(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd"));
    if (owns) {  // so that this does not block if another thread has taken the event
      const int flags = MK_SYSCALL(fcntl(context->async_fd, F_GETFL), "fcntl");
      MK_SYSCALL(fcntl(context->async_fd, F_SETFL, flags | O_NONBLOCK), "fcntl");
    }
  } catch (...) {
    release();
    throw;
  }
}

PortInfo Device::port(int number) const {
  const Use use(*this, "port");
  const int num_ports = static_cast<int>(info_.ports.size());
  MK_CHECK(number >= 1 && number <= num_ports, "port: number must be in 1 to ", num_ports, ", got ",
           number);
  return describe_port(context_, number);
}

std::optional<AsyncEvent> Device::wait_event(double timeout_s) {
  const Use use(*this, "wait_event");
  MK_CHECK(owns_, "wait_event: ", name(), " must be opened here, but is borrowed");
  ibv_async_event event;
  while (Verbs::get().p_ibv_get_async_event(context_, &event) != 0) {
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      throw SystemError(errno, concat("ibv_get_async_event: ", name()));
    }
    if (!wait_readable(context_->async_fd, leave_.get(), timeout_s)) return std::nullopt;
  }
  const AsyncEvent described = describe(event);
  // Immediately: destroying the object of an event waits for its acknowledgement.
  Verbs::get().p_ibv_ack_async_event(&event);
  return described;
}

void Device::interrupt() noexcept { eventfd_write(leave_.get(), 1); }

void Device::release() noexcept {
  if (!owns_) return;
  Verbs::get().p_ibv_dealloc_pd(pd_);
  Verbs::get().p_ibv_close_device(context_);
}

}  // namespace mk::rdma
