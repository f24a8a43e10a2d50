// XXH3 compiled for AVX2: 1.7 times as fast as with SSE2 (Zen 5).
#include "store/xxh3.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define XXH_INLINE_ALL
#define XXH_VECTOR 2  // XXH_AVX2
#include "xxhash/xxhash.h"

namespace mk::store {
namespace {
#include "store/xxh3_functions.h"
}  // namespace

const Xxh3* Xxh3::avx2() { return &kFunctions; }

}  // namespace mk::store
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#else
namespace mk::store {

const Xxh3* Xxh3::avx2() { return nullptr; }

}  // namespace mk::store
#endif
