// FileChannel: the peer is a file on a disk of this machine; its addresses are offsets in the file.
//
// Layer: transfer. Many works are in flight at once, in no order; their ops share the slots of one
// IoQueue. If the disk fails, only that work fails, and its outcome says how much of it is done. A
// file cannot be notified: a notification is a sync, which follows all earlier works. GPU memory:
// whole pages go by GPUDirect Storage if available (gpu_file.h), the rest through pinned memory.
#pragma once

#include <sys/uio.h>

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "transfer/channel/channel.h"
#include "transfer/file/bounce.h"
#include "transfer/file/disk_file.h"
#include "transfer/file/file_op.h"
#include "transfer/file/gpu_bounce.h"
#include "transfer/file/io_queue.h"
#include "transfer/memory/gpu_ranges.h"

namespace mk::transfer {

class FileChannel : public Channel {
 public:
  explicit FileChannel(std::shared_ptr<const DiskFile> file) : file_(std::move(file)) {}

  Transport transport() const override { return Transport::kFile; }
  size_t window() const override { return 64; }
  uint64_t max_piece_bytes() const override { return 16ull << 20; }
  void connect(const Limit& limit) override;
  void disconnect() noexcept override;
  void close() noexcept override;
  bool connected() const override { return io_ != nullptr; }
  void post(const Work& work, const Limit& limit) override;
  Outcome finish(const Limit& limit) override;
  uint64_t num_bytes_so_far() const override {
    return posted_.empty() ? 0 : posted_.front().outcome.num_bytes;
  }
  std::unique_ptr<Channel> another() const override;
  Path path_to(const Range& range, int device) const override;

 private:
  // A work that was posted.
  struct Posted {
    bool writes = false;
    bool syncs = false;  // and has not begun to
    OpCutter cutter{};
    std::deque<FileOp> again{};  // what is left of ops that GPUDirect Storage did not take
    GpuRanges gpus{};            // of its local memory
    size_t num_under_way = 0;    // of its ops
    size_t num_gpus_do = 0;      // of these, by GPUDirect Storage
    Outcome outcome{};

    bool failed() const { return !outcome.refusal.empty(); }
    bool has_more() const { return !cutter.at_end() || !again.empty() || syncs; }
    bool over() const { return num_under_way == 0 && (failed() || !has_more()); }
    bool next(FileOp& op);
  };

  // An op in flight, and what is left of it.
  struct Slot {
    Posted* work;
    IoCall::Kind kind;
    FileOp op;
    int device;  // the GPU that has all of its memory, if GPUDirect Storage moves it; else -1
    Bounce bounce;
    char* chunk;    // of pinned memory, if some of its memory is a GPU's
    iovec bounced;  // the whole of it, if the op is bounced or has a chunk
    iovec* parts;
    size_t num_parts;
  };

  void check(const Work& work) const;  // throws Refused
  void issue(const Limit& limit);
  bool take(Posted& work, Slot& slot, const Limit& limit);
  void give_up(const Slot& slot, const Failure& failure);
  bool gpus_do();
  void prepare(Slot& slot, const Limit& limit);
  void push(size_t index);
  IoDone next_done(const Posted& work, const Limit& limit);
  void complete(const IoDone& done, const Limit& limit);
  void take_back(const Slot& slot, int64_t error);
  void scatter(Slot& slot, const Limit& limit);

  mutable std::mutex file_mutex_;         // of the pointer: another() may be called during close()
  std::shared_ptr<const DiskFile> file_;  // null once closed
  std::unique_ptr<IoQueue> io_;
  std::unique_ptr<IoQueue> gpu_io_;  // once it was needed
  size_t num_gpus_do_ = 0;
  std::vector<Slot> slots_;
  std::vector<size_t> free_;
  std::deque<Posted> posted_;
  GpuBounce gpu_bounce_;
};

}  // namespace mk::transfer
