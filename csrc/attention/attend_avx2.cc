// Attention compiled for AVX2 and FMA.
#include <cmath>
#include <utility>

#include "attention/paged_attention.h"
#include "common/element_rows.h"

#if defined(__x86_64__)
#include <immintrin.h>

// For all functions from here on, which is why isa/ is included rather than linked.
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define MK_LANES 8
#define MK_PAIRS 0

namespace mk::attention {
namespace {
#include "attention/isa/functions.h"
}  // namespace

const AttendFunctions* AttendFunctions::avx2() { return &kFunctions; }

}  // namespace mk::attention
#pragma GCC pop_options
#else
namespace mk::attention {

const AttendFunctions* AttendFunctions::avx2() { return nullptr; }

}  // namespace mk::attention
#endif
