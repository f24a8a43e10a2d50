// Attention compiled for AVX-512 with products of bfloat16 pairs.
#include <cmath>
#include <utility>

#include "attention/paged_attention.h"
#include "common/element_rows.h"

#if defined(__x86_64__)
#include <immintrin.h>

// For all functions from here on, which is why isa/ is included rather than linked.
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")
#define MK_LANES 16
#define MK_PAIRS 1

namespace mk::attention {
namespace {
#include "attention/isa/functions.h"
}  // namespace

const AttendFunctions* AttendFunctions::avx512_bf16() { return &kFunctions; }

}  // namespace mk::attention
#pragma GCC pop_options
#else
namespace mk::attention {

const AttendFunctions* AttendFunctions::avx512_bf16() { return nullptr; }

}  // namespace mk::attention
#endif
