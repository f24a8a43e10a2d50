// FileOp: one system call's read or write of a file; OpCutter: cuts a piece into them.
//
//   OpCutter cutter(request, piece, file.direct_rules());
//   for (FileOp op; cutter.next(op);) preadv(file.fd(op.direct), op.parts.data(), ...);
//
// Layer: transfer. Ranges that are consecutive in the file are one op, wherever they are in memory.
// The whole pages they cover bypass the page cache; the rest at either end, a page at most, goes
// through it. So no page is touched both ways, unless ranges overlap. Nor is any folio: the kernel
// caches what is written at once as one, and would report a folio with pages of both kinds as an
// I/O error at the next sync.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <vector>

#include "transfer/file/disk_file.h"
#include "transfer/request/piece.h"
#include "transfer/request/request.h"

namespace mk::transfer {

constexpr uint64_t kMaxOpBytes = 1ull << 20;         // larger ones are not faster
constexpr uint64_t kMaxBouncedBytes = 256ull << 10;  // copies stay in a CPU's cache
constexpr size_t kMaxOpParts = 256;                  // of the 1024 that the kernel takes

struct FileOp {
  bool direct;      // bypasses the page cache
  bool bounced;     // through aligned memory, because its own is not
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
