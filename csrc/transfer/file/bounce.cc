#include "transfer/file/bounce.h"

#include <new>
#include <optional>

#include "common/copy_bytes.h"
#include "common/fault_guard.h"
#include "transfer/base/error.h"

namespace mk::transfer {
namespace {

constexpr uint64_t kPageBytes = 4096;  // more than any disk requires

void expect(const std::optional<Fault>& fault) {
  if (fault) throw Inaccessible("local ", fault->describe());
}

}  // namespace

char* Bounce::room(uint64_t num_bytes) {
  if (num_bytes > num_bytes_) {
    const uint64_t whole = (num_bytes + kPageBytes - 1) & ~(kPageBytes - 1);
    memory_.reset(static_cast<char*>(std::aligned_alloc(kPageBytes, whole)));
    num_bytes_ = memory_ ? whole : 0;
    if (!memory_) throw std::bad_alloc();
  }
  return memory_.get();
}

char* Bounce::gather(const std::vector<iovec>& parts, uint64_t num_bytes) {
  char* const begin = room(num_bytes);
  char* to = begin;
  expect(guarded([&]() noexcept {
    for (const iovec& part : parts) {
      copy_bytes(to, part.iov_base, part.iov_len);
      to += part.iov_len;
    }
  }));
  return begin;
}

void Bounce::scatter(const std::vector<iovec>& parts) const {
  const char* from = memory_.get();
  expect(guarded([&]() noexcept {
    for (const iovec& part : parts) {
      copy_bytes(part.iov_base, from, part.iov_len);
      from += part.iov_len;
    }
  }));
}

}  // namespace mk::transfer
