// RunCopier: many contiguous copies of equal length on the CPU, by the method that suits the job.
//
//   RunCopier copier(total_bytes, run_bytes);
//   for (const Run& run : runs) copier.add(run);
//   copier.finish();
//
// A job that does not fit the last-level cache uses non-temporal stores: a plain store first reads
// the line that it overwrites, which costs a third of the memory's bandwidth, and evicts lines that
// others use. The processor prefetches only within a page, so a single run would wait for memory at
// each new page. With AVX-512, where one store is a whole line, runs are therefore read four at a
// time. Half lines from four places at once are slow (Zen 3: 0.6 of one after the other), so with
// AVX2 the beginning of the next run is prefetched instead. Short runs that go through the cache
// are prefetched some runs ahead.
//
// Layer: common.
#pragma once

#include <cstdint>

namespace mk {

// A contiguous range to copy; src is null if there is nothing to do.
struct Run {
  const char* src;
  char* dst;
};

constexpr int kStreams = 4;
constexpr int kMaxAhead = 8;  // short runs prefetched before they are copied

// The job size from which stores bypass the cache: a third of the last-level cache, as the job
// reads as much as it writes and others need their share, but 8 MiB at most; or what was measured
// on this machine (`python -m mooncake_kernels calibrate`).
int64_t stream_from_bytes();
// Sets it for the whole process (0: the default); returns the previous value.
int64_t set_stream_from_bytes(int64_t num_bytes);

// Orders stores that bypass the cache with later stores, which may announce them to others.
void fence_streamed_stores();

class RunCopier {
 public:
  // `total_bytes` is what all threads together will copy.
  RunCopier(int64_t total_bytes, int64_t run_bytes);

  // May defer the copy until finish().
  void add(const Run& run);

  // Copies the rest, and orders all copies before any later store.
  void finish();

 private:
  // Copies kStreams runs at once, or one; `next` are the runs that follow, or null.
  struct Streaming {
    int num_runs;
    void (*copy)(const Run* runs, const Run* next, int64_t run_bytes);  // null: not here
  };
  static Streaming streaming(int64_t run_bytes);

  // Copies `run` and prefetches `later`.
  using CopyAndFetch = void (*)(const Run& run, const Run& later, int64_t run_bytes);
  static CopyAndFetch copying_and_fetching();

  void copy_alone(const Run& run);
  void copy_fetched(const Run& run);

  const int64_t run_bytes_;
  const Streaming stream_;  // null function: through the cache
  Run pending_[2 * kStreams];
  int num_pending_ = 0;
  const CopyAndFetch copy_and_fetch_;  // null: no prefetch
  const int num_ahead_;
  Run fetched_[kMaxAhead];  // a ring of num_ahead_ runs, num_fetched_ of them filled
  int num_fetched_ = 0;
  int next_fetched_ = 0;
};

}  // namespace mk
