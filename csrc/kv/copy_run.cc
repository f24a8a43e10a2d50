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

// A long run is read in this many places at once. The processor fetches ahead only within a page,
// so that one place alone waits for memory at each new one; eight keep more of it busy.
constexpr int64_t kStreams = 8;
constexpr int64_t kMinStreamBytes = 2048;
constexpr int64_t kStepBytes = 256;

void copy_through_cache(void* dst, const void* src, int64_t num_bytes) {
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

__attribute__((target("avx512f"), always_inline)) inline void step_avx512(char* dst,
                                                                          const char* src) {
  const __m512i a = _mm512_loadu_si512(src), b = _mm512_loadu_si512(src + 64);
  const __m512i c = _mm512_loadu_si512(src + 128), d = _mm512_loadu_si512(src + 192);
  auto* out = reinterpret_cast<__m512i*>(dst);
  _mm512_stream_si512(out, a);
  _mm512_stream_si512(out + 1, b);
  _mm512_stream_si512(out + 2, c);
  _mm512_stream_si512(out + 3, d);
}

__attribute__((target("avx2"), always_inline)) inline void step_avx2(char* dst, const char* src) {
  const auto* in = reinterpret_cast<const __m256i*>(src);
  auto* out = reinterpret_cast<__m256i*>(dst);
  for (int half = 0; half < 8; half += 4) {
    const __m256i a = _mm256_loadu_si256(in + half), b = _mm256_loadu_si256(in + half + 1);
    const __m256i c = _mm256_loadu_si256(in + half + 2), d = _mm256_loadu_si256(in + half + 3);
    _mm256_stream_si256(out + half, a);
    _mm256_stream_si256(out + half + 1, b);
    _mm256_stream_si256(out + half + 2, c);
    _mm256_stream_si256(out + half + 3, d);
  }
}

// The same for both: the step must be inlined into a function of its own target.
#define MK_STREAM(step)                                                                        \
  auto* dst = static_cast<char*>(to);                                                          \
  const auto* src = static_cast<const char*>(from);                                            \
  int64_t i = copy_head(dst, src, num_bytes, 64);                                              \
  const int64_t stream = (num_bytes - i) / kStreams / kStepBytes * kStepBytes;                 \
  if (stream >= kMinStreamBytes) {                                                             \
    for (int64_t j = i; j < i + stream; j += kStepBytes) {                                     \
      for (int64_t k = 0; k < kStreams; ++k) step(dst + j + k * stream, src + j + k * stream); \
    }                                                                                          \
    i += kStreams * stream;                                                                    \
  }                                                                                            \
  for (; i + kStepBytes <= num_bytes; i += kStepBytes) step(dst + i, src + i);                 \
  std::memcpy(dst + i, src + i, num_bytes - i);                                                \
  _mm_sfence() /* streamed stores are not ordered with those that tell others of them */

__attribute__((target("avx512f"))) void stream_avx512(void* to, const void* from,
                                                      int64_t num_bytes) {
  MK_STREAM(step_avx512);
}

__attribute__((target("avx2"))) void stream_avx2(void* to, const void* from, int64_t num_bytes) {
  MK_STREAM(step_avx2);
}

#undef MK_STREAM

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
