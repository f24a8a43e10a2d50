// Attention of a mixed batch over a paged KV cache, with row masks, on the CPU.
//
//   PagedAttention attention(params);                        // cuts the batch into tasks
//   for (int64_t i = 0; i < attention.num_tasks(); ++i) attention.run(i, workspace);
//   for (int64_t i = 0; i < attention.num_merges(); ++i) attention.merge(i, workspace);
//   // run each loop in any order, on any threads, with a Workspace per thread; then check
//   // params.bad_entry
//
// A task is some queries of one request, for the query heads that share one KV head: its rows are
// (query, head). It processes the keys in tiles with an online softmax; isa/attend.h describes the
// tiles. Keys are processed in splits of kSplitKeys, each from a fresh state, and the splits are
// merged in order, whether one task has them all (prompts) or each has one (few queries, which are
// to use all threads); those of which nothing is seen are skipped. So the bits of a row depend only
// on its query, its mask and its keys: not on the batch, the chunk it came in, the threads, or the
// block size. Layer: attention. Python: mooncake_kernels/attention/paged.py.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention/row_mask.h"
#include "common/element.h"

namespace mk::attention {

constexpr int64_t kTileKeys = 64;   // one word has a bit per key
constexpr int64_t kTileRows = 256;  // unless a query has more heads
constexpr int64_t kSplitKeys = 1024;
constexpr float kLog2E = 0x1.715476p+0f;
constexpr float kLn2 = 0x1.62e430p-1f;

// Keys or values: [block][token][head][dim], strides in bytes, dim innermost and packed.
struct PagedCache {
  const char* data;
  ElementType type;
  int64_t block_stride;
  int64_t token_stride;
  int64_t head_stride;
  int64_t dim;
  const float* scales;  // [num_kv_heads], the value of a stored 1.0; null: 1
};

struct PagedAttentionParams {
  const char* q;  // [num_q][heads][k.dim], strides in bytes
  ElementType q_type;
  int64_t q_row_stride;
  int64_t q_head_stride;
  PagedCache k;
  PagedCache v;
  const int32_t* block_table;  // [num_requests][table_stride]
  int64_t table_stride;
  int64_t num_blocks;
  int64_t block_size;
  RowMask mask;
  int64_t num_requests;
  int64_t num_heads;
  int64_t num_kv_heads;
  float scale;
  char* out;   // [num_q][heads][v.dim] of q's type
  float* lse;  // [num_q][heads], natural logarithms
  // The smallest request * table_stride + entry whose block is needed but missing; else kNoEntry.
  std::atomic<int64_t>* bad_entry;

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t tile_queries() const { return group() < kTileRows ? kTileRows / group() : 1; }
};

constexpr int64_t kNoEntry = INT64_MAX;

inline void report_bad_entry(std::atomic<int64_t>& least, int64_t entry) {
  int64_t old = least.load(std::memory_order_relaxed);
  while (entry < old && !least.compare_exchange_weak(old, entry, std::memory_order_relaxed)) {
  }
}

struct Task {
  int32_t request;
  int32_t kv_head;
  int32_t first_query;  // a row of the batch
  int32_t num_queries;
  int64_t split;    // the task's only split; or kAllSplits
  int64_t partial;  // the index of its state among those of all splits
};

constexpr int64_t kAllSplits = -1;

// The state of rows after some keys: the maximum of their scores (times log2 e), the sum of
// 2^(score - maximum), and that sum weighted by each key's value, [rows][padded_dim].
struct Softmax {
  float* maximum;
  float* sum;
  float* values;

  // Lays a state out in memory of floats(rows, padded_dim).
  static Softmax in(float* memory, int64_t num_rows) {
    return {memory, memory + num_rows, memory + 2 * num_rows};
  }
  static int64_t floats(int64_t num_rows, int64_t padded_dim) {
    return num_rows * (padded_dim + 2);
  }
};

inline int64_t padded_dim(int64_t dim) { return (dim + 31) / 32 * 32; }

// A thread's memory, reused from task to task.
class Workspace {
 public:
  float* reserve(int64_t num_floats);

 private:
  static constexpr int64_t kLineFloats = 16;
  struct alignas(64) Line {  // so that no vector spans two of them
    float floats[kLineFloats];
  };
  std::vector<Line> memory_;
};

// The functions compiled for each instruction set: see attend.h.
struct AttendFunctions {
  // Writes to params.out or, for a task of one split, to its state.
  void (*attend)(const PagedAttentionParams&, const Task&, const Softmax* state, Workspace&);
  // Merges the splits of some rows, whose states are consecutive, into the result.
  void (*merge)(const PagedAttentionParams&, const Task&, float* splits, int64_t num_splits,
                Workspace&);

  static const AttendFunctions* portable();
  static const AttendFunctions* avx2();
  static const AttendFunctions* avx512();
  static const AttendFunctions* avx512_bf16();  // for bfloat16 queries only

  // The functions with the widest vectors that this processor has for these types.
  static const AttendFunctions& best(const PagedAttentionParams& params);
};

class PagedAttention {
 public:
  explicit PagedAttention(const PagedAttentionParams& params)
      : PagedAttention(params, AttendFunctions::best(params)) {}
  PagedAttention(const PagedAttentionParams& params, const AttendFunctions& functions);

  int64_t num_tasks() const { return static_cast<int64_t>(tasks_.size()); }
  int64_t num_merges() const { return static_cast<int64_t>(merges_.size()); }
  void run(int64_t task, Workspace& workspace);
  void merge(int64_t index, Workspace& workspace);

 private:
  struct Merge {
    Task task;
    int64_t num_splits;
  };
  void add_request(int32_t request);
  void add_splits(Task task);

  const PagedAttentionParams params_;
  const AttendFunctions& functions_;
  std::vector<Task> tasks_;
  std::vector<Merge> merges_;
  int64_t num_floats_ = 0;  // of the states of all splits
  std::unique_ptr<float[]> partials_;
};

}  // namespace mk::attention
