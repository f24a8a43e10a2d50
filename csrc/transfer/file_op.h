// FileOp: what one system call reads or writes of a file; OpCutter: cuts a piece into them.
//
//   OpCutter cutter(request, piece, file.direct_rules());
//   for (FileOp op; cutter.next(op);) preadv(file.fd(op.direct), op.parts.data(), ...);
//
// Layer: transfer. Ranges that follow each other in the file are one op, wherever in memory they
// lie. What they cover of whole pages goes past the page cache, what is left at either end through
// it, a page at most. So no page is touched both ways, unless ranges overlap; and the kernel, which
// caches what is written at once as one folio, has none that holds pages of both kinds: it would
// call that an I/O error at the next sync.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <vector>

#include "transfer/disk_file.h"
#include "transfer/piece.h"
#include "transfer/request.h"

namespace mk::transfer {

constexpr uint64_t kMaxOpBytes = 1ull << 20;         // more of it does not make a disk faster
constexpr uint64_t kMaxBouncedBytes = 256ull << 10;  // what is copied stays in a CPU's cache
constexpr size_t kMaxOpParts = 256;                  // of the 1024 that the kernel takes

struct FileOp {
  bool direct;      // past the page cache
  bool bounced;     // by way of aligned memory, for its own is not
  uint64_t offset;  // in the file
  uint64_t num_bytes;
  std::vector<iovec> parts;
};

class OpCutter {
 public:
  OpCutter() = default;  // cuts nothing
  OpCutter(const Request& request, const Piece& piece, const DirectRules& rules)
      : request_(&request),
        rules_(rules),
        index_(piece.first_range),
        offset_(piece.offset),
        num_left_(piece.num_bytes) {}

  bool next(FileOp& op);  // false at the end
  bool at_end() const { return num_left_ == 0; }

 private:
  uint64_t place() const { return request_->remote[index_] + offset_; }
  void take(uint64_t max_bytes, FileOp& op);
  bool is_aligned(const FileOp& op) const;

  const Request* request_ = nullptr;
  DirectRules rules_;
  size_t index_ = 0;     // of the range
  uint64_t offset_ = 0;  // in it
  uint64_t num_left_ = 0;
};

}  // namespace mk::transfer
