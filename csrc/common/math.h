// Integer arithmetic for host and device code.
//
// Layer: common.
#pragma once

#include <cstdint>

#include "common/hd.h"

namespace mk {

// ceil(a / b) for a >= 0, b > 0.
MK_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

MK_HD int count_ones(uint64_t bits) {
#if defined(__CUDA_ARCH__)
  return __popcll(bits);
#else
  return __builtin_popcountll(bits);
#endif
}

}  // namespace mk
