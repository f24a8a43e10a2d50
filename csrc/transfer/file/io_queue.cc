#include "transfer/file/io_queue.h"

#include <unistd.h>

#include <cerrno>

#include "common/check.h"
#include "transfer/file/io_ring.h"

namespace mk::transfer {
namespace {

// Runs calls in the waiting thread. A call that has begun cannot be interrupted: it is as short as
// its caller has made it.
class BlockingIo : public IoQueue {
 public:
  size_t num_slots() const override { return 1; }
  void push(size_t, const IoCall& call) override { call_ = call; }
  IoDone next(const Limit& limit) override {
    limit.check();
    const int64_t result = make();
    return {0, result < 0 ? -errno : result};
  }

 private:
  int64_t make() const {
    const auto offset = static_cast<off_t>(call_.offset);
    const auto num_parts = static_cast<int>(call_.num_parts);
    switch (call_.kind) {
      case IoCall::Kind::kRead:
        return preadv(call_.fd, call_.parts, num_parts, offset);
      case IoCall::Kind::kWrite:
        return pwritev(call_.fd, call_.parts, num_parts, offset);
      case IoCall::Kind::kSync:
        break;
    }
    return fdatasync(call_.fd);
  }

  IoCall call_{};
};

bool is_absence(int error_number) {
  // ENOMEM: kernels before 5.12 charge a ring to the locked memory limit, which may be 0.
  return error_number == ENOSYS || error_number == EPERM || error_number == EACCES ||
         error_number == ENOMEM;
}

}  // namespace

std::unique_ptr<IoQueue> make_io_queue(size_t num_slots) {
  try {
    return std::make_unique<IoRing>(num_slots);
  } catch (const SystemError& error) {
    if (!is_absence(error.code().value())) throw;
    return std::make_unique<BlockingIo>();
  }
}

}  // namespace mk::transfer
