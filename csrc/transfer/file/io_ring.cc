#include "transfer/file/io_ring.h"

#include <poll.h>

#include <cerrno>
#include <chrono>
#include <thread>

#include "common/check.h"

namespace mk::transfer {
namespace {

constexpr uint64_t kOfCancel = UINT64_MAX;  // in place of a slot
constexpr std::chrono::milliseconds kRetryEvery{1};
// Calls pushed before they are submitted. Completions come many at once: a disk would stand idle
// until all of them are seen to, and each submission costs a microsecond or more.
constexpr uint32_t kSubmitAt = 4;

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

IoRing::IoRing(size_t num_slots)
    : ring_(static_cast<uint32_t>(num_slots)), slots_(num_slots, Slot::kFree) {}

IoRing::~IoRing() {
  withdraw();
  cancel_all();
  IoDone done;
  while (true) {
    while (pop(done)) {
    }
    if (num_touching_ == 0) break;
    if (ring_.enter(0, 1) < 0 && errno != EINTR) std::this_thread::sleep_for(kRetryEvery);
  }
}

void IoRing::push(size_t slot, const IoCall& call) {
  io_uring_sqe& entry = ring_.push();
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
  if (ring_.num_pushed() >= kSubmitAt) submit();
  if (pop(done)) return done;
  submit();
  while (!pop(done)) wait_ready(ring_.fd(), POLLIN, limit);
  return done;
}

void IoRing::free_slot(size_t slot) {
  --num_used_;
  num_touching_ -= slots_[slot] == Slot::kMemory;
  slots_[slot] = Slot::kFree;
}

void IoRing::submit() {
  while (const uint32_t num_left = ring_.num_pushed()) {
    if (ring_.enter(num_left, 0) >= 0 || errno == EINTR) continue;
    // Temporarily out of memory: the rest is submitted after the next completion, if one is due.
    const bool later = errno == EAGAIN || errno == EBUSY;
    if (!later || num_left == num_used_) throw SystemError(errno, "io_uring_enter");
    break;
  }
}

bool IoRing::pop(IoDone& done) {
  io_uring_cqe entry;
  while (ring_.pop(entry)) {
    if (entry.user_data == kOfCancel) continue;
    done = {entry.user_data, entry.res};
    free_slot(done.slot);
    return true;
  }
  return false;
}

void IoRing::withdraw() {
  while (const io_uring_sqe* const entry = ring_.take_back()) free_slot(entry->user_data);
}

void IoRing::cancel_all() {
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot] == Slot::kFree) continue;
    io_uring_sqe& entry = ring_.push();
    entry.opcode = IORING_OP_ASYNC_CANCEL;
    entry.fd = -1;
    entry.addr = slot;
    entry.user_data = kOfCancel;
  }
  while (const uint32_t num_left = ring_.num_pushed()) {
    if (ring_.enter(num_left, 0) < 0 && errno != EINTR) break;  // then they end by themselves
  }
}

}  // namespace mk::transfer
