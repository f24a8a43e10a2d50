// RunCopier: many contiguous copies of one length on the CPU, by the way that suits the whole job.
//
//   RunCopier copier(total_bytes, run_bytes);
//   for (const Run& run : runs) copier.add(run);
//   copier.finish();
//
// What does not fit the last-level cache is stored past it (non-temporal): a plain store first
// reads the line that it overwrites, which costs a third of the memory's bandwidth, and evicts what
// somebody else was using. The processor fetches ahead only within a page, so that one run alone
// waits for memory at each new page. With AVX-512, where a store is a whole line, runs are read
// four at a time for that reason. Halves of lines from four places at once are slow (Zen 3: 0.6 of
// one after the other), so that with AVX2 the beginning of the next run is fetched instead. Short
// runs that go through the cache are fetched some runs before they are copied.
#pragma once

#include <cstdint>

namespace mk {

// A contiguous range to copy; src is null where there is nothing to do.
struct Run {
  const char* src;
  char* dst;
};

constexpr int kStreams = 4;
constexpr int kMaxAhead = 8;  // short runs that are fetched before they are copied

// From how many bytes on a job is stored past the cache: a third of the last-level cache, as much
// being read as written and others wanting their part; or what was measured on this machine
// (`python -m mooncake_kernels calibrate`).
int64_t stream_from_bytes();
// Sets it for the whole process, 0 for what it was; returns what it was before.
int64_t set_stream_from_bytes(int64_t num_bytes);

class RunCopier {
 public:
  // `total_bytes` is what all threads together will copy.
  RunCopier(int64_t total_bytes, int64_t run_bytes);

  // May wait with the copy until finish().
  void add(const Run& run);

  // Copies what is left, and orders all that was copied before any later store.
  void finish();

 private:
  // Of kStreams runs at once, or of one; `next` are those that will be read afterwards, or null.
  struct Streaming {
    int num_runs;
    void (*copy)(const Run* runs, const Run* next, int64_t run_bytes);  // null: not here
  };
  static Streaming streaming(int64_t run_bytes);

  // Copies `run`, and fetches `later`.
  using CopyAndFetch = void (*)(const Run& run, const Run& later, int64_t run_bytes);
  static CopyAndFetch copying_and_fetching();

  void copy_alone(const Run& run);
  void copy_fetched(const Run& run);

  const int64_t run_bytes_;
  const Streaming stream_;  // without a function: through the cache
  Run pending_[2 * kStreams];
  int num_pending_ = 0;
  const CopyAndFetch copy_and_fetch_;  // null: one after the other
  const int num_ahead_;
  Run fetched_[kMaxAhead];  // a ring of num_ahead_, of which num_fetched_ are there
  int num_fetched_ = 0;
  int next_fetched_ = 0;
};

}  // namespace mk
