#include "transfer/file/file_channel.h"

#include <cerrno>
#include <memory>
#include <numeric>
#include <utility>

#include "common/check.h"
#include "transfer/base/error.h"
#include "transfer/file/gpu_file_queue.h"
#include "transfer/net/stream.h"

namespace mk::transfer {
namespace {

constexpr size_t kNumSlots = 64;  // ops in flight: more than a fast disk needs

ErrorReason reason_of(IoCall::Kind kind, uint64_t offset, int64_t result) {
  std::string what = "syncing";
  if (kind == IoCall::Kind::kRead) what = concat("reading at offset ", offset);
  if (kind == IoCall::Kind::kWrite) what = concat("writing at offset ", offset);
  if (result < 0) return reason_of_errno(static_cast<int>(-result), what);
  return {concat(what, ": the file ends there now"), FailureKind::kInaccessible};
}

}  // namespace

void FileChannel::connect(const Limit&) {
  if (!file_) throw Failure("the file was closed", FailureKind::kClosed);
  io_ = make_io_queue(kNumSlots);
  slots_.resize(io_->num_slots());
  free_.resize(slots_.size());
  std::iota(free_.begin(), free_.end(), size_t{0});
}

void FileChannel::disconnect() noexcept {
  io_.reset();  // first: until then they may use the parts of a slot
  gpu_io_.reset();
  num_gpus_do_ = 0;
  posted_.clear();
  gpu_bounce_.settle();
}

void FileChannel::close() noexcept {
  disconnect();
  gpu_bounce_.close();
  const std::lock_guard lock(file_mutex_);
  file_.reset();
}

std::unique_ptr<Channel> FileChannel::another() const {
  const std::lock_guard lock(file_mutex_);
  return std::make_unique<FileChannel>(file_);
}

void FileChannel::post(const Work& work, const Limit& limit) {
  Posted& posted = posted_.emplace_back();
  posted.writes = work.request->writes();
  posted.syncs = work.kind == Work::Kind::kNotify;
  if (posted.syncs) return;
  try {
    check(work);
  } catch (const Refused& refused) {
    posted.outcome.refusal = refused.reason();
    return;
  }
  if (work.kind == Work::Kind::kCheck) return;
  posted.cutter = {*work.request, work.piece, file_->direct_rules()};
  posted.gpus = GpuRanges(work.request->regions);
  issue(limit);
}

Outcome FileChannel::finish(const Limit& limit) {
  Posted& oldest = posted_.front();
  while (!oldest.over()) {
    issue(limit);
    if (!oldest.over()) complete(next_done(oldest, limit), limit);
  }
  Outcome outcome = std::move(oldest.outcome);
  posted_.pop_front();
  return outcome;
}

Path FileChannel::path_to(const Range&, int device) const {
  if (device < 0) return {"disk", "the file", "a disk reads and writes the memory"};
  if (file_->gpu_file()) {
    return {"disk", "the file", "whole pages go by GPUDirect Storage, past the host's memory"};
  }
  return {
      "staged", "the file",
      concat("cuda:", device, " is copied by way of pinned memory: ", file_->why_no_gpu_file())};
}

// Waits for something of that work if it has ops in flight; else, as it waits for others, for any.
IoDone FileChannel::next_done(const Posted& work, const Limit& limit) {
  const bool gpus_do_all = work.num_gpus_do == work.num_under_way && num_gpus_do_ > 0;
  return (gpus_do_all ? gpu_io_ : io_)->next(limit);
}

bool FileChannel::Posted::next(FileOp& op) {
  if (again.empty()) return cutter.next(op);
  op = std::move(again.front());
  again.pop_front();
  return true;
}

void FileChannel::check(const Work& work) const {
  const Request& request = *work.request;
  if (request.writes() && !file_->why_read_only().empty()) {
    throw Refused(concat("the file may only be read: ", file_->why_read_only()));
  }
  const bool whole = work.kind == Work::Kind::kCheck;
  const size_t begin = whole ? 0 : work.piece.first_range;
  const size_t end = whole ? request.num_ranges() : begin + work.piece.num_ranges;
  const uint64_t file_bytes = file_->num_bytes();  // each time: it may have grown
  for (size_t i = begin; i < end; ++i) {
    const uint64_t offset = request.remote[i], num_bytes = request.size_of(i);
    if (num_bytes <= file_bytes && offset <= file_bytes - num_bytes) continue;
    throw Refused(concat("descriptors[", i, "] remote range ", describe({offset, num_bytes}),
                         " is not inside the file of ", file_bytes, " bytes"));
  }
}

// Of the oldest works first.
void FileChannel::issue(const Limit& limit) {
  for (Posted& work : posted_) {
    while (!free_.empty() && take(work, slots_[free_.back()], limit)) {
      const size_t index = free_.back();
      free_.pop_back();
      push(index);
    }
    if (free_.empty()) return;
  }
}

bool FileChannel::take(Posted& work, Slot& slot, const Limit& limit) {
  if (work.failed() || (!work.gpus.empty() && !gpu_bounce_.has_room())) return false;
  slot.work = &work;
  if (work.syncs) {
    if (&work != &posted_.front()) return false;  // earlier works may be in flight
    work.syncs = false;
    slot.kind = IoCall::Kind::kSync;
    slot.op = {};
  } else {
    if (!work.next(slot.op)) return false;
    slot.kind = work.writes ? IoCall::Kind::kWrite : IoCall::Kind::kRead;
  }
  try {
    prepare(slot, limit);
  } catch (const GpuFailure& failure) {
    give_up(slot, failure);
    return false;
  } catch (const Inaccessible& fault) {
    give_up(slot, fault);
    return false;
  }
  ++work.num_under_way;
  return true;
}

void FileChannel::give_up(const Slot& slot, const Failure& failure) {
  if (slot.chunk) gpu_bounce_.give_back(slot.chunk);
  slot.work->outcome.refusal = failure.reason();
}

// Whether GPUDirect Storage is available.
bool FileChannel::gpus_do() {
  const GpuFile* const gpu_file = file_->gpu_file();
  if (!gpu_file || gpu_io_) return gpu_file;
  try {
    gpu_io_ = std::make_unique<GpuFileQueue>(*gpu_file, slots_.size());
  } catch (const std::exception& error) {  // no threads
    file_->give_up_gpu_file(error.what());
  }
  return gpu_io_ != nullptr;
}

void FileChannel::prepare(Slot& slot, const Limit& limit) {
  FileOp& op = slot.op;
  slot.parts = op.parts.data();
  slot.num_parts = op.parts.size();
  slot.chunk = nullptr;
  slot.device = -1;
  int gpu = -1;
  bool is_of_one = true;
  for_each_stretch(op.parts, slot.work->gpus, [&](uint64_t, uint64_t, int device) {
    is_of_one &= device >= 0 && (gpu < 0 || device == gpu);
    if (device >= 0) gpu = device;
  });
  if (gpu >= 0 && is_of_one && op.direct && gpus_do()) {
    op.bounced = false;  // GPU memory need not be aligned
    slot.device = gpu;
    return;
  }
  if (gpu >= 0) {
    slot.chunk = gpu_bounce_.take(gpu);
    if (slot.kind == IoCall::Kind::kWrite) {
      gpu_bounce_.gather(op.parts, slot.work->gpus, slot.chunk, limit);
    }
    slot.bounced = {slot.chunk, op.num_bytes};
    slot.parts = &slot.bounced;
    slot.num_parts = 1;
    return;
  }
  if (!op.bounced) return;
  char* const memory = slot.kind == IoCall::Kind::kWrite
                           ? slot.bounce.gather(op.parts, op.num_bytes)
                           : slot.bounce.room(op.num_bytes);
  slot.bounced = {memory, op.num_bytes};
  slot.parts = &slot.bounced;
  slot.num_parts = 1;
}

void FileChannel::push(size_t index) {
  const Slot& slot = slots_[index];
  const IoCall call{slot.kind,      file_->fd(slot.op.direct),
                    slot.op.offset, slot.parts,
                    slot.num_parts, slot.device};
  if (slot.device < 0) return io_->push(index, call);
  ++num_gpus_do_;
  ++slot.work->num_gpus_do;
  gpu_io_->push(index, call);
}

void FileChannel::complete(const IoDone& done, const Limit& limit) {
  Slot& slot = slots_[done.slot];
  Outcome& outcome = slot.work->outcome;
  if (slot.device >= 0) {
    --num_gpus_do_;
    --slot.work->num_gpus_do;
  }
  if (done.result > 0) {
    const auto num_bytes = static_cast<uint64_t>(done.result);
    slot.op.offset += num_bytes;
    advance(slot.parts, slot.num_parts, num_bytes);
    const bool scatters = (slot.op.bounced || slot.chunk) && slot.kind == IoCall::Kind::kRead;
    if (!scatters) outcome.num_bytes += num_bytes;
    if (slot.num_parts > 0) return push(done.slot);
    if (scatters) scatter(slot, limit);
  } else if (done.result == -EAGAIN || done.result == -EINTR) {
    return push(done.slot);
  } else if (slot.device >= 0 && (is_gpu_file_error(done.result) || done.result == -EINVAL)) {
    take_back(slot, done.result);
  } else if (done.result == -EINVAL && slot.op.direct) {
    slot.op.direct = false;  // the file system requires more than the kernel reported
    return push(done.slot);
  } else if (done.result < 0 || slot.kind != IoCall::Kind::kSync) {
    if (!slot.work->failed()) outcome.refusal = reason_of(slot.kind, slot.op.offset, done.result);
  }
  if (slot.chunk) gpu_bounce_.give_back(slot.chunk);
  --slot.work->num_under_way;
  free_.push_back(done.slot);
}

// The rest of the op, and everything after it, goes through host memory.
void FileChannel::take_back(const Slot& slot, int64_t error) {
  file_->give_up_gpu_file(concat("cuFile failed with error ", -error));
  FileOp rest = slot.op;
  rest.parts.assign(slot.parts, slot.parts + slot.num_parts);
  rest.num_bytes = 0;
  for (const iovec& part : rest.parts) rest.num_bytes += part.iov_len;
  rest.direct = rest.offset % file_->direct_rules().file_align == 0 &&
                rest.num_bytes % file_->direct_rules().file_align == 0;
  slot.work->again.push_back(std::move(rest));
}

void FileChannel::scatter(Slot& slot, const Limit& limit) {
  Outcome& outcome = slot.work->outcome;
  try {
    if (slot.chunk) {
      gpu_bounce_.scatter(slot.chunk, slot.op.parts, slot.work->gpus, limit);
    } else {
      slot.bounce.scatter(slot.op.parts);
    }
    outcome.num_bytes += slot.op.num_bytes;
  } catch (const GpuFailure& failure) {
    if (!slot.work->failed()) outcome.refusal = failure.reason();
  } catch (const Inaccessible& fault) {
    if (!slot.work->failed()) outcome.refusal = fault.reason();
  }
}

}  // namespace mk::transfer
