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

// A run is read in this many places at once, each fetched this far ahead. The processor fetches
// ahead only within a page, so that one place alone waits for memory at each new one.
constexpr int64_t kStreams = 4;
constexpr int64_t kAheadBytes = 256;
constexpr int64_t kStepBytes = 256;
// The next run is likely in other pages, whose addresses take longer to find than memory to read.
constexpr int64_t kNextPageAheadBytes = 2048;

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

// The streams of a run: all of it, but for less than kStreams * kStepBytes at its end.
struct Streams {
  const char* src;
  const char* next;
  int64_t num_bytes;  // of one of them

  // Asks for what is to be read kAheadBytes after byte i of stream k, in this run or the next.
  // always_inline: GCC takes a function that only prefetches for one without effect, and drops the
  // calls that it has not inlined by then.
  __attribute__((always_inline)) void prefetch(int64_t k, int64_t i) const {
    if (next && i == num_bytes - kNextPageAheadBytes) {
      _mm_prefetch(next + k * num_bytes, _MM_HINT_NTA);
    }
    const int64_t ahead = i + kAheadBytes;
    const char* from = ahead < num_bytes ? src + k * num_bytes + ahead
                       : next            ? next + k * num_bytes + (ahead - num_bytes)
                                         : src;
    for (int64_t line = 0; line < kStepBytes; line += 64) _mm_prefetch(from + line, _MM_HINT_NTA);
  }
};

// One text for both: a step must be inlined into a function of its own target.
#define MK_STREAM(step)                                                  \
  const int64_t head = copy_head(dst, src, num_bytes, 64);               \
  dst += head, src += head, num_bytes -= head;                           \
  const int64_t stream = num_bytes / kStreams / kStepBytes * kStepBytes; \
  const Streams streams{src, next, stream};                              \
  for (int64_t i = 0; i < stream; i += kStepBytes) {                     \
    for (int64_t k = 0; k < kStreams; ++k) {                             \
      streams.prefetch(k, i);                                            \
      step(dst + k * stream + i, src + k * stream + i);                  \
    }                                                                    \
  }                                                                      \
  const int64_t done = kStreams * stream;                                \
  std::memcpy(dst + done, src + done, num_bytes - done);                 \
  _mm_sfence() /* streamed stores are not ordered with those that tell others of them */

__attribute__((target("avx512f"))) void stream_avx512(char* dst, const char* src, int64_t num_bytes,
                                                      const char* next) {
  MK_STREAM(step_avx512);
}

__attribute__((target("avx2"))) void stream_avx2(char* dst, const char* src, int64_t num_bytes,
                                                 const char* next) {
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
