// FileOp: what one system call reads or writes of a file; OpCutter: cuts a piece into them.
//
//   OpCutter cutter(request, piece, file.direct_rules());
//   for (FileOp op; cutter.next(op);) preadv(file.fd(op.direct), op.parts.data(), ...);
//
// Layer: transfer. Ranges that follow each other in the file are one op, wherever in memory they
// lie. The pages that a range covers go past the page cache if its address allows, its ends through
// it: so no page is ever touched both ways, unless ranges overlap.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <vector>

#include "transfer/disk_file.h"
#include "transfer/piece.h"
#include "transfer/request.h"

namespace mk::transfer {

constexpr uint64_t kMaxOpBytes = 1ull << 20;  // more of it does not make a disk faster
constexpr size_t kMaxOpParts = 256;           // of the 1024 that the kernel takes

struct FileOp {
  bool direct;
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
  // The next bytes that go one way.
  struct Step {
    bool direct;
    uint64_t memory;
    uint64_t offset;
    uint64_t num_bytes;
  };

  Step look() const;
  void skip(uint64_t num_bytes);

  const Request* request_ = nullptr;
  DirectRules rules_;
  size_t index_ = 0;     // of the range
  uint64_t offset_ = 0;  // in it
  uint64_t num_left_ = 0;
};

}  // namespace mk::transfer
