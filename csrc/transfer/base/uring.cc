#include "transfer/base/uring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "common/check.h"

namespace mk::transfer {
namespace {

// Linux 5.5: one mapping for both rings, completions are never dropped, and submitted entries need
// not be kept. Older kernels cannot cancel either.
constexpr uint32_t kNeeded =
    IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_SUBMIT_STABLE;

uint32_t acquire(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void release(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

}  // namespace

Uring::Mapping::Mapping(const Fd& ring, uint64_t what, size_t num_bytes) : num_bytes_(num_bytes) {
  void* const data = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                          ring.get(), static_cast<off_t>(what));
  if (data == MAP_FAILED) throw SystemError(errno, "mmap of an io_uring");
  data_ = static_cast<char*>(data);
  madvise(data, num_bytes, MADV_DONTFORK);
}

Uring::Mapping& Uring::Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

Uring::Mapping::~Mapping() {
  if (data_) munmap(data_, num_bytes_);
}

Uring::Uring(uint32_t num_entries) {
  io_uring_params params{};
  const long fd = syscall(SYS_io_uring_setup, num_entries, &params);
  fd_ = Fd(static_cast<int>(MK_SYSCALL(fd, "io_uring_setup")));
  if (kNeeded & ~params.features) throw SystemError(ENOSYS, "io_uring_setup");

  const io_sqring_offsets& to = params.sq_off;
  const io_cqring_offsets& from = params.cq_off;
  rings_ = Mapping(fd_, IORING_OFF_SQ_RING,
                   std::max(to.array + params.sq_entries * sizeof(uint32_t),
                            from.cqes + params.cq_entries * sizeof(io_uring_cqe)));
  entries_ = Mapping(fd_, IORING_OFF_SQES, params.sq_entries * sizeof(io_uring_sqe));
  submit_head_ = rings_.at<uint32_t>(to.head);
  submit_tail_ = rings_.at<uint32_t>(to.tail);
  submit_mask_ = *rings_.at<uint32_t>(to.ring_mask);
  done_head_ = rings_.at<uint32_t>(from.head);
  done_tail_ = rings_.at<uint32_t>(from.tail);
  done_mask_ = *rings_.at<uint32_t>(from.ring_mask);
  done_ = rings_.at<io_uring_cqe>(from.cqes);
  for (uint32_t i = 0; i < params.sq_entries; ++i) rings_.at<uint32_t>(to.array)[i] = i;
}

io_uring_sqe& Uring::push() {
  io_uring_sqe& pushed = entry(tail_++);
  pushed = {};
  return pushed;
}

uint32_t Uring::num_pushed() {
  release(submit_tail_, tail_);
  return tail_ - acquire(submit_head_);
}

const io_uring_sqe* Uring::take_back() {
  if (tail_ == acquire(submit_head_)) return nullptr;
  release(submit_tail_, --tail_);
  return &entry(tail_);
}

bool Uring::pop(io_uring_cqe& done) {
  const uint32_t head = *done_head_;
  if (head == acquire(done_tail_)) return false;
  done = done_[head & done_mask_];
  release(done_head_, head + 1);
  return true;
}

int Uring::enter(uint32_t num_to_submit, uint32_t num_to_wait_for) const {
  const unsigned flags = num_to_wait_for > 0 ? IORING_ENTER_GETEVENTS : 0;
  return static_cast<int>(syscall(SYS_io_uring_enter, fd_.get(), num_to_submit, num_to_wait_for,
                                  flags, nullptr, size_t{0}));
}

}  // namespace mk::transfer
