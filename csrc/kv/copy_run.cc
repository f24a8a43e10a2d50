#include "kv/copy_run.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mk::kv {
namespace {

// Shorter runs lose more to the fence and to the unaligned ends than streaming gains.
constexpr int64_t kMinStreamedRunBytes = 1024;
constexpr int64_t kPageBytes = 4096;

void copy_through_cache(char* dst, const char* src, int64_t num_bytes, const char*) {
  std::memcpy(dst, src, num_bytes);
}

int64_t last_level_cache_bytes() {
  static const int64_t bytes = std::max<int64_t>(sysconf(_SC_LEVEL3_CACHE_SIZE), int64_t{8} << 20);
  return bytes;
}

#if defined(__x86_64__)

// Copies up to the first address of `dst` that is a multiple of `alignment`; returns that length.
int64_t copy_head(char* dst, const char* src, int64_t num_bytes, int64_t alignment) {
  const int64_t misaligned = reinterpret_cast<uintptr_t>(dst) % alignment;
  const int64_t head = std::min(misaligned ? alignment - misaligned : 0, num_bytes);
  std::memcpy(dst, src, head);
  return head;
}

// Asks for the 256 bytes that are to be read a page after `src + i`, in this run or the next one.
inline void prefetch(const char* src, int64_t i, int64_t num_bytes, const char* next) {
  const int64_t ahead = i + kPageBytes;
  const char* from = ahead < num_bytes ? src + ahead : next ? next + (ahead - num_bytes) : src + i;
  for (int line = 0; line < 4; ++line) _mm_prefetch(from + 64 * line, _MM_HINT_NTA);
}

__attribute__((target("avx512f"))) void stream_avx512(char* dst, const char* src, int64_t num_bytes,
                                                      const char* next) {
  int64_t i = copy_head(dst, src, num_bytes, 64);
  for (; i + 256 <= num_bytes; i += 256) {
    prefetch(src, i, num_bytes, next);
    const __m512i a = _mm512_loadu_si512(src + i);
    const __m512i b = _mm512_loadu_si512(src + i + 64);
    const __m512i c = _mm512_loadu_si512(src + i + 128);
    const __m512i d = _mm512_loadu_si512(src + i + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i + 192), d);
  }
  std::memcpy(dst + i, src + i, num_bytes - i);
  _mm_sfence();  // streamed stores are not ordered with those that tell others of them
}

__attribute__((target("avx2"))) void stream_avx2(char* dst, const char* src, int64_t num_bytes,
                                                 const char* next) {
  int64_t i = copy_head(dst, src, num_bytes, 32);
  for (; i + 256 <= num_bytes; i += 256) {
    prefetch(src, i, num_bytes, next);
    const auto* in = reinterpret_cast<const __m256i*>(src + i);
    auto* out = reinterpret_cast<__m256i*>(dst + i);
    for (int half = 0; half < 8; half += 4) {
      const __m256i a = _mm256_loadu_si256(in + half), b = _mm256_loadu_si256(in + half + 1);
      const __m256i c = _mm256_loadu_si256(in + half + 2), d = _mm256_loadu_si256(in + half + 3);
      _mm256_stream_si256(out + half, a);
      _mm256_stream_si256(out + half + 1, b);
      _mm256_stream_si256(out + half + 2, c);
      _mm256_stream_si256(out + half + 3, d);
    }
  }
  std::memcpy(dst + i, src + i, num_bytes - i);
  _mm_sfence();
}

CopyRun streaming_copy() {
  static const CopyRun best = __builtin_cpu_supports("avx512f") ? stream_avx512
                              : __builtin_cpu_supports("avx2")  ? stream_avx2
                                                                : copy_through_cache;
  return best;
}

#else

CopyRun streaming_copy() { return copy_through_cache; }

#endif

}  // namespace

CopyRun choose_copy_run(int64_t total_bytes, int64_t run_bytes) {
  const bool fits_cache = 2 * total_bytes <= last_level_cache_bytes();  // read and written
  if (fits_cache || run_bytes < kMinStreamedRunBytes) return copy_through_cache;
  return streaming_copy();
}

}  // namespace mk::kv
