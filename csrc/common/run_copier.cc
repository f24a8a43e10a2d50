#include "common/run_copier.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common/copy_bytes.h"
#include "common/cpu_cache.h"

namespace mk {
namespace {

constexpr int64_t kLineBytes = 64;
constexpr int64_t kMinStreamedRunBytes = 128;
// Runs whose ends share a line with other data must be long enough for that not to matter.
constexpr int64_t kMinUnevenRunBytes = 1024;
// With AVX2, these are streamed one after the other; shorter ones are faster four at a time.
constexpr int64_t kMinSingleRunBytes = 4096;
// A single run is cut into as many as are read at once, if the parts are at least this long.
constexpr int64_t kMinCutBytes = 4096;
// The processor prefetches longer runs by itself soon enough.
constexpr int64_t kMaxFetchedRunBytes = 4096;
// From here on a run is copied while another one is fetched: fetched at once, it has too many
// lines.
constexpr int64_t kMinSteppedRunBytes = 1024;

// Of a larger job the lines come from memory anyway, however large the cache is; and where its size
// is that of a whole processor, virtual machines beside this one use it too (300 MiB, 2 of its
// cores: jobs of 8 MiB and more are 1.5 times as fast past it).
constexpr int64_t kMaxCachedBytes = int64_t{8} << 20;

std::atomic<int64_t> chosen_stream_from_bytes{0};  // 0: not set

// Prefetches bytes [begin, end) of a run. always_inline: GCC considers a function that only
// prefetches free of side effects, and drops calls that it has not inlined.
__attribute__((always_inline)) inline void fetch(const Run& run, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += kLineBytes) {
    __builtin_prefetch(run.src + i, 0);
    __builtin_prefetch(run.dst + i, 1);
  }
}

#if defined(__x86_64__)

// The part of a run that bypasses the cache: whole lines of dst.
struct Middle {
  int64_t head;  // bytes before it
  int64_t num_bytes;
};

// The same number of lines for every run, wherever in a line it begins.
Middle middle_of(const Run& run, int64_t run_bytes) {
  const int64_t misaligned = reinterpret_cast<uintptr_t>(run.dst) % kLineBytes;
  if (misaligned == 0) return {0, run_bytes / kLineBytes * kLineBytes};
  return {kLineBytes - misaligned, (run_bytes - kLineBytes) / kLineBytes * kLineBytes};
}

template <int kLines>
__attribute__((target("avx512f"), always_inline)) inline void store_avx512(char* dst,
                                                                           const char* src) {
  __m512i lines[kLines];
  for (int i = 0; i < kLines; ++i) lines[i] = _mm512_loadu_si512(src + i * kLineBytes);
  for (int i = 0; i < kLines; ++i) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst + i * kLineBytes), lines[i]);
  }
}

template <int kLines>
__attribute__((target("avx2"), always_inline)) inline void store_avx2(char* dst, const char* src) {
  const auto* in = reinterpret_cast<const __m256i*>(src);
  auto* out = reinterpret_cast<__m256i*>(dst);
  __m256i halves[2 * kLines];
  for (int i = 0; i < 2 * kLines; ++i) halves[i] = _mm256_loadu_si256(in + i);
  for (int i = 0; i < 2 * kLines; ++i) _mm256_stream_si256(out + i, halves[i]);
}

constexpr int kStepLines = 4;
constexpr int64_t kStepBytes = kStepLines * kLineBytes;

// Runs up to this length are prefetched into the L2 cache a whole run ahead: it allows more fetches
// in flight than L1, and kStreams of them take a part of it.
constexpr int64_t kMaxFarBytes = int64_t{32} << 10;

// Prefetches what will be read kStepBytes after byte i of stream k, in its run or the next, and
// what will be read a run later.
__attribute__((always_inline)) inline void prefetch(const char* src, const Run* next, int k,
                                                    int64_t i, int64_t num_bytes) {
  if (next && num_bytes <= kMaxFarBytes) {
    for (int64_t line = 0; line < kStepBytes; line += kLineBytes) {
      _mm_prefetch(next[k].src + i + line, _MM_HINT_T1);
    }
  } else if (next && i == num_bytes / 2 / kStepBytes * kStepBytes) {
    // It is probably in another page, whose translation takes longer than the read from memory.
    _mm_prefetch(next[k].src, _MM_HINT_NTA);
  }
  const int64_t ahead = i + kStepBytes;
  const char* from = ahead < num_bytes ? src + ahead
                     : next            ? next[k].src + (ahead - num_bytes)
                                       : src;
  for (int64_t line = 0; line < kStepBytes; line += kLineBytes) {
    _mm_prefetch(from + line, _MM_HINT_NTA);
  }
}

// One source for both: stores must be inlined into a function of their own target.
#define MK_STREAM(store)                                                               \
  const char* src[kStreams];                                                           \
  char* dst[kStreams];                                                                 \
  int64_t num_bytes = run_bytes;                                                       \
  for (int k = 0; k < kStreams; ++k) {                                                 \
    const Middle middle = middle_of(runs[k], run_bytes);                               \
    num_bytes = std::min(num_bytes, middle.num_bytes);                                 \
    src[k] = runs[k].src + middle.head;                                                \
    dst[k] = runs[k].dst + middle.head;                                                \
  }                                                                                    \
  int64_t i = 0;                                                                       \
  for (; i + kStepBytes <= num_bytes; i += kStepBytes) {                               \
    for (int k = 0; k < kStreams; ++k) {                                               \
      prefetch(src[k], next, k, i, num_bytes);                                         \
      store<kStepLines>(dst[k] + i, src[k] + i);                                       \
    }                                                                                  \
  }                                                                                    \
  for (; i < num_bytes; i += kLineBytes) {                                             \
    for (int k = 0; k < kStreams; ++k) store<1>(dst[k] + i, src[k] + i);               \
  }                                                                                    \
  for (int k = 0; k < kStreams; ++k) {                                                 \
    const int64_t head = dst[k] - runs[k].dst;                                         \
    std::memcpy(runs[k].dst, runs[k].src, head);                                       \
    std::memcpy(dst[k] + num_bytes, src[k] + num_bytes, run_bytes - head - num_bytes); \
  }

__attribute__((target("avx512f"))) void stream_avx512(const Run* runs, const Run* next,
                                                      int64_t run_bytes) {
  MK_STREAM(store_avx512)
}

__attribute__((target("avx2"))) void stream_avx2(const Run* runs, const Run* next,
                                                 int64_t run_bytes) {
  MK_STREAM(store_avx2)
}

#undef MK_STREAM

// Copies one run while the beginning of the next one is fetched.
__attribute__((target("avx2"))) void stream_alone_avx2(const Run* run, const Run* next,
                                                       int64_t run_bytes) {
  constexpr int64_t kStep = 2 * kLineBytes, kBeginBytes = 4 * kLineBytes;
  const auto [head, num_bytes] = middle_of(*run, run_bytes);
  char* const dst = run->dst + head;
  const char* const src = run->src + head;
  int64_t i = 0;
  for (; next && i < kBeginBytes && i + kStep <= num_bytes; i += kStep) {
    _mm_prefetch(next->src + i, _MM_HINT_T0);
    _mm_prefetch(next->src + i + kLineBytes, _MM_HINT_T0);
    store_avx2<2>(dst + i, src + i);
  }
  for (; i + kStep <= num_bytes; i += kStep) store_avx2<2>(dst + i, src + i);
  for (; i < num_bytes; i += kLineBytes) store_avx2<1>(dst + i, src + i);
  if (num_bytes == run_bytes) return;
  std::memcpy(run->dst, run->src, head);
  std::memcpy(dst + num_bytes, src + num_bytes, run_bytes - head - num_bytes);
}

// Copies a run, and prefetches a later one between its steps.
__attribute__((target("avx512f"))) void copy_and_fetch_avx512(const Run& run, const Run& later,
                                                              int64_t run_bytes) {
  int64_t i = 0;
  for (; i + kStepBytes <= run_bytes; i += kStepBytes) {
    fetch(later, i, i + kStepBytes);
    __m512i lines[kStepLines];
    for (int k = 0; k < kStepLines; ++k) {
      lines[k] = _mm512_loadu_si512(run.src + i + k * kLineBytes);
    }
    for (int k = 0; k < kStepLines; ++k) {
      _mm512_storeu_si512(run.dst + i + k * kLineBytes, lines[k]);
    }
  }
  fetch(later, i, run_bytes);
  std::memcpy(run.dst + i, run.src + i, run_bytes - i);
}

#endif

}  // namespace

RunCopier::Streaming RunCopier::streaming([[maybe_unused]] int64_t run_bytes) {
#if defined(__x86_64__)
  static const bool has_avx512 = __builtin_cpu_supports("avx512f");
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx512) return {kStreams, stream_avx512};
  if (has_avx2 && run_bytes >= kMinSingleRunBytes) return {1, stream_alone_avx2};
  if (has_avx2) return {kStreams, stream_avx2};
#endif
  return {};
}

RunCopier::CopyAndFetch RunCopier::copying_and_fetching() {
#if defined(__x86_64__)
  static const CopyAndFetch best =
      __builtin_cpu_supports("avx512f") ? copy_and_fetch_avx512 : nullptr;
  return best;
#else
  return nullptr;
#endif
}

int64_t stream_from_bytes() {
  const int64_t chosen = chosen_stream_from_bytes.load(std::memory_order_relaxed);
  return chosen != 0 ? chosen : std::min(last_level_cache_bytes() / 3 + 1, kMaxCachedBytes);
}

void fence_streamed_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

int64_t set_stream_from_bytes(int64_t num_bytes) {
  const int64_t before = stream_from_bytes();
  chosen_stream_from_bytes.store(num_bytes, std::memory_order_relaxed);
  return before;
}

RunCopier::RunCopier(int64_t total_bytes, int64_t run_bytes)
    : run_bytes_(run_bytes),
      stream_(total_bytes >= stream_from_bytes() && run_bytes >= kMinStreamedRunBytes
                  ? streaming(run_bytes)
                  : Streaming{}),
      copy_and_fetch_(run_bytes >= kMinSteppedRunBytes ? copying_and_fetching() : nullptr),
      num_ahead_(copy_and_fetch_
                     ? static_cast<int>(std::max<int64_t>(kMaxFetchedRunBytes / run_bytes, 1))
                     : kMaxAhead) {}

void RunCopier::add(const Run& run) {
  const bool is_even = (reinterpret_cast<uintptr_t>(run.dst) | run_bytes_) % kLineBytes == 0;
  if (!stream_.copy || (run_bytes_ < kMinUnevenRunBytes && !is_even)) {
    if (run_bytes_ < kMinSteppedRunBytes ||
        (copy_and_fetch_ && run_bytes_ <= kMaxFetchedRunBytes)) {
      return copy_fetched(run);
    }
    copy_bytes(run.dst, run.src, run_bytes_);
    return;
  }
  pending_[num_pending_++] = run;
  const int num_runs = stream_.num_runs;
  if (num_pending_ < 2 * num_runs) return;
  stream_.copy(pending_, pending_ + num_runs, run_bytes_);
  std::copy(pending_ + num_runs, pending_ + 2 * num_runs, pending_);
  num_pending_ = num_runs;
}

// Prefetches a run, and copies the one that was prefetched num_ahead_ runs ago.
void RunCopier::copy_fetched(const Run& run) {
  Run& oldest = fetched_[next_fetched_];
  if (++next_fetched_ == num_ahead_) next_fetched_ = 0;
  if (num_fetched_ < num_ahead_) {
    fetch(run, 0, run_bytes_);
    ++num_fetched_;
  } else if (copy_and_fetch_) {
    copy_and_fetch_(oldest, run, run_bytes_);
  } else {
    fetch(run, 0, run_bytes_);
    copy_bytes(oldest.dst, oldest.src, run_bytes_);
  }
  oldest = run;
}

void RunCopier::finish() {
  for (int i = 0; i < num_fetched_; ++i) {
    copy_bytes(fetched_[i].dst, fetched_[i].src, run_bytes_);
  }
  num_fetched_ = next_fetched_ = 0;
  int done = 0;
  if (stream_.copy && num_pending_ >= stream_.num_runs) {
    stream_.copy(pending_, nullptr, run_bytes_);
    done = stream_.num_runs;
  }
  for (; done < num_pending_; ++done) copy_alone(pending_[done]);
  num_pending_ = 0;
  if (stream_.copy) fence_streamed_stores();
}

// Copies one of the runs that were to be read kStreams at a time.
void RunCopier::copy_alone(const Run& run) {
  const int64_t part = run_bytes_ / kStreams / kLineBytes * kLineBytes;
  if (part < kMinCutBytes) {
    copy_bytes(run.dst, run.src, run_bytes_);
    return;
  }
  Run parts[kStreams];
  for (int k = 0; k < kStreams; ++k) parts[k] = {run.src + k * part, run.dst + k * part};
  stream_.copy(parts, nullptr, part);
  const int64_t done = kStreams * part;
  std::memcpy(run.dst + done, run.src + done, run_bytes_ - done);
}

}  // namespace mk
