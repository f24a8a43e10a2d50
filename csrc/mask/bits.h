// Runs of bits in a word, for the host and CUDA.
//
//   for (BitRuns runs(tail); runs.next();) use(runs.begin, runs.end);
//
// Layer: mask.
#pragma once

#include <cstdint>

#include "common/hd.h"

namespace mk::mask {

// The number of zeros below the lowest one in `bits`, which is not 0.
MK_HD int trailing_zeros(uint64_t bits) {
#if defined(__CUDA_ARCH__)
  return __ffsll(static_cast<long long>(bits)) - 1;
#else
  return __builtin_ctzll(bits);
#endif
}

// The bits [begin, end) of a word, both clipped to [0, 64].
MK_HD uint64_t bits_between(int64_t begin, int64_t end) {
  if (begin < 0) begin = 0;
  if (end > 64) end = 64;
  if (begin >= end) return 0;
  const uint64_t below_end = end == 64 ? ~uint64_t{0} : (uint64_t{1} << end) - 1;
  return below_end & ~((uint64_t{1} << begin) - 1);
}

// bits << by; a negative `by` shifts right, and shifts by 64 or more give 0.
MK_HD uint64_t shifted(uint64_t bits, int64_t by) {
  if (by >= 64 || by <= -64) return 0;
  return by >= 0 ? bits << by : bits >> -by;
}

// The runs of ones, lowest first.
struct BitRuns {
  uint64_t rest;
  int begin = 0;
  int end = 0;

  MK_HD explicit BitRuns(uint64_t bits) : rest(bits) {}

  MK_HD bool next() {
    if (!rest) return false;
    begin = trailing_zeros(rest);
    const uint64_t zeros = ~rest & ~bits_between(0, begin);
    end = zeros ? trailing_zeros(zeros) : 64;
    rest &= ~bits_between(begin, end);
    return true;
  }
};

}  // namespace mk::mask
