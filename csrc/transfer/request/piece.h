// Piece: a part of a request that is moved at once; Cutter: cuts a request into pieces.
//
//   Cutter cutter(request, /*max_bytes=*/4 << 20);
//   for (Piece piece; cutter.next(piece);) { fill(request, piece, batch); send(batch); }
//
// Layer: transfer. A descriptor larger than a piece continues in the next one.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "transfer/request/request.h"

namespace mk::transfer {

struct Piece {
  size_t first_range = 0;  // index in the request
  size_t num_ranges = 0;
  uint64_t offset = 0;     // where it begins in the first range
  uint64_t num_bytes = 0;  // it may end within the last one
  uint64_t position = 0;   // where it begins in all the request's bytes
};

class Cutter {
 public:
  Cutter(const Request& request, uint64_t max_bytes) : request_(request), max_bytes_(max_bytes) {}

  bool next(Piece& piece);  // false at the end
  bool at_end() const { return index_ == request_.num_ranges(); }

 private:
  const Request& request_;
  const uint64_t max_bytes_;
  size_t index_ = 0;     // of the range
  uint64_t offset_ = 0;  // in it
  uint64_t position_ = 0;
};

// A piece's ranges at either end, the same bytes in the same order.
struct Batch {
  std::vector<Range> remote;
  std::vector<iovec> local;  // neighbours are merged
};
void fill(const Request& request, const Piece& piece, Batch& batch);

// Calls move(local address, remote address, bytes) for each range of a piece.
template <class Move>
void for_each_range(const Request& request, const Piece& piece, Move move) {
  uint64_t offset = piece.offset, left = piece.num_bytes;
  for (size_t i = piece.first_range; left > 0; ++i, offset = 0) {
    const uint64_t here = request.size_of(i) - offset;
    const uint64_t step = here < left ? here : left;
    move(request.local[i] + offset, request.remote[i] + offset, step);
    left -= step;
  }
}

// Appends memory to a list, extending the last part if it is adjacent.
void append_part(std::vector<iovec>& parts, uint64_t address, uint64_t num_bytes);

}  // namespace mk::transfer
