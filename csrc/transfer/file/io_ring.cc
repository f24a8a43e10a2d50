#include "transfer/file/io_ring.h"

#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>

#include "common/check.h"

namespace mk::transfer {
namespace {

// Linux 5.5: one mapping for both rings, completions are never dropped, and submitted entries need
// not be kept. Older kernels cannot cancel either.
constexpr uint32_t kNeeded =
    IORING_FEAT_SINGLE_MMAP | IORING_FEAT_NODROP | IORING_FEAT_SUBMIT_STABLE;

constexpr uint64_t kOfCancel = UINT64_MAX;  // in place of a slot
constexpr std::chrono::milliseconds kRetryEvery{1};

uint32_t acquire(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void release(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

uint8_t opcode_of(IoCall::Kind kind) {
  switch (kind) {
    case IoCall::Kind::kRead:
      return IORING_OP_READV;
    case IoCall::Kind::kWrite:
      return IORING_OP_WRITEV;
    case IoCall::Kind::kSync:
      break;
  }
  return IORING_OP_FSYNC;
}

}  // namespace

IoRing::Mapping::Mapping(const Fd& ring, uint64_t what, size_t num_bytes) : num_bytes_(num_bytes) {
  void* const data = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                          ring.get(), static_cast<off_t>(what));
  if (data == MAP_FAILED) throw SystemError(errno, "mmap of an io_uring");
  data_ = static_cast<char*>(data);
  madvise(data, num_bytes, MADV_DONTFORK);
}

IoRing::Mapping& IoRing::Mapping::operator=(Mapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(num_bytes_, other.num_bytes_);
  return *this;
}

IoRing::Mapping::~Mapping() {
  if (data_) munmap(data_, num_bytes_);
}

IoRing::IoRing(size_t num_slots) : slots_(num_slots, Slot::kFree) {
  io_uring_params params{};
  const long fd = syscall(SYS_io_uring_setup, static_cast<unsigned>(num_slots), &params);
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

IoRing::~IoRing() {
  withdraw();
  cancel_all();
  IoDone done;
  while (true) {
    while (pop(done)) {
    }
    if (num_touching_ == 0) break;
    if (enter(0, 1) < 0 && errno != EINTR) std::this_thread::sleep_for(kRetryEvery);
  }
}

void IoRing::push(size_t slot, const IoCall& call) {
  io_uring_sqe& entry = new_entry();
  entry.opcode = opcode_of(call.kind);
  entry.fd = call.fd;
  entry.user_data = slot;
  ++num_used_;
  if (call.kind == IoCall::Kind::kSync) {
    entry.fsync_flags = IORING_FSYNC_DATASYNC;
    slots_[slot] = Slot::kSync;
    return;
  }
  entry.off = call.offset;
  entry.addr = reinterpret_cast<uint64_t>(call.parts);
  entry.len = static_cast<uint32_t>(call.num_parts);
  slots_[slot] = Slot::kMemory;
  ++num_touching_;
}

IoDone IoRing::next(const Limit& limit) {
  limit.check();
  IoDone done;
  if (pop(done)) return done;  // pushed calls are submitted together, once all are popped
  submit();
  while (!pop(done)) wait_ready(fd_.get(), POLLIN, limit);
  return done;
}

void IoRing::free_slot(size_t slot) {
  --num_used_;
  num_touching_ -= slots_[slot] == Slot::kMemory;
  slots_[slot] = Slot::kFree;
}

io_uring_sqe& IoRing::new_entry() {
  io_uring_sqe& entry = entries_.at<io_uring_sqe>(0)[tail_++ & submit_mask_];
  entry = {};
  return entry;
}

void IoRing::submit() {
  release(submit_tail_, tail_);
  while (const uint32_t num_left = tail_ - acquire(submit_head_)) {
    if (enter(num_left, 0) >= 0 || errno == EINTR) continue;
    // Temporarily out of memory: the rest is submitted after the next completion, if one is due.
    const bool later = errno == EAGAIN || errno == EBUSY;
    if (!later || num_left == num_used_) throw SystemError(errno, "io_uring_enter");
    break;
  }
}

bool IoRing::pop(IoDone& done) {
  uint32_t head = *done_head_;
  while (head != acquire(done_tail_)) {
    const io_uring_cqe entry = done_[head & done_mask_];
    release(done_head_, ++head);
    if (entry.user_data == kOfCancel) continue;
    done = {entry.user_data, entry.res};
    free_slot(done.slot);
    return true;
  }
  return false;
}

void IoRing::withdraw() {
  const uint32_t head = acquire(submit_head_);
  for (; tail_ != head; --tail_) {
    free_slot(entries_.at<io_uring_sqe>(0)[(tail_ - 1) & submit_mask_].user_data);
  }
  release(submit_tail_, tail_);
}

void IoRing::cancel_all() {
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot] == Slot::kFree) continue;
    io_uring_sqe& entry = new_entry();
    entry.opcode = IORING_OP_ASYNC_CANCEL;
    entry.fd = -1;
    entry.addr = slot;
    entry.user_data = kOfCancel;
  }
  release(submit_tail_, tail_);
  while (const uint32_t num_left = tail_ - acquire(submit_head_)) {
    if (enter(num_left, 0) < 0 && errno != EINTR) break;  // then they end by themselves
  }
}

int IoRing::enter(unsigned num_to_submit, unsigned num_to_wait_for) const {
  const unsigned flags = num_to_wait_for > 0 ? IORING_ENTER_GETEVENTS : 0;
  return static_cast<int>(syscall(SYS_io_uring_enter, fd_.get(), num_to_submit, num_to_wait_for,
                                  flags, nullptr, size_t{0}));
}

}  // namespace mk::transfer
