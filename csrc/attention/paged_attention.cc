#include "attention/paged_attention.h"

#include <algorithm>

#include "common/math.h"

namespace mk::attention {
namespace {

bool is_bf16_or_fp8(ElementType type) {
  return type == ElementType::kBFloat16 || type == ElementType::kFloat8E4M3 ||
         type == ElementType::kFloat8E5M2;
}

}  // namespace

const AttendFunctions& AttendFunctions::best(const PagedAttentionParams& p) {
#if defined(__x86_64__)
  const bool has_avx512 = __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool is_bf16 =
      p.q_type == ElementType::kBFloat16 && is_bf16_or_fp8(p.k.type) && is_bf16_or_fp8(p.v.type);
  if (has_avx512 && is_bf16 && __builtin_cpu_supports("avx512bf16")) {
    return *avx512_bf16();
  }
  if (has_avx512) return *avx512();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return *avx2();
  }
#endif
  return *portable();
}

float* Workspace::reserve(int64_t num_floats) {
  const auto num_lines = static_cast<size_t>(ceil_div(num_floats, kLineFloats));
  if (memory_.size() < num_lines) memory_.resize(num_lines);
  return reinterpret_cast<float*>(memory_.data());
}

PagedAttention::PagedAttention(const PagedAttentionParams& params, const AttendFunctions& functions)
    : params_(params), functions_(functions) {
  for (int32_t request = 0; request < params.num_requests; ++request) add_request(request);
  partials_.reset(new float[static_cast<size_t>(num_floats_)]);  // left unset: tasks clear theirs
}

// Starts with the last queries: under a causal mask they take the longest.
void PagedAttention::add_request(int32_t request) {
  const int64_t begin = params_.mask.cu_q[request], end = params_.mask.cu_q[request + 1];
  const int64_t step = params_.tile_queries();
  const int64_t num_splits = ceil_div(params_.mask.kv_lens[request], kSplitKeys);
  Task task{request, 0, 0, 0, kAllSplits, 0};
  for (int64_t tile = ceil_div(end - begin, step) - 1; tile >= 0; --tile) {
    task.first_query = static_cast<int32_t>(begin + tile * step);
    task.num_queries = static_cast<int32_t>(std::min(step, end - task.first_query));
    if (end - begin <= step && num_splits > 1) return add_splits(task);
    for (task.kv_head = 0; task.kv_head < params_.num_kv_heads; ++task.kv_head) {
      tasks_.push_back(task);
    }
  }
}

// Only splits with keys that are seen. Consecutive tasks are heads of the same keys, as these often
// share pages of memory.
void PagedAttention::add_splits(Task task) {
  const TileRange range(params_.mask, task.first_query, task.num_queries, task.request);
  const int64_t kv_len = params_.mask.kv_lens[task.request];
  std::vector<int64_t> splits;
  for (int64_t key = range.next(0); key < kv_len;
       key = range.next((splits.back() + 1) * kSplitKeys)) {
    splits.push_back(key / kSplitKeys);
  }
  const auto num_splits = static_cast<int64_t>(splits.size());
  const int64_t num_rows = task.num_queries * params_.group();
  const int64_t floats = Softmax::floats(num_rows, padded_dim(params_.v.dim));
  const int64_t first = num_floats_;
  num_floats_ += params_.num_kv_heads * num_splits * floats;
  for (task.kv_head = 0; task.kv_head < params_.num_kv_heads; ++task.kv_head) {
    task.partial = first + task.kv_head * num_splits * floats;
    merges_.push_back({task, num_splits});
  }
  for (int64_t i = 0; i < num_splits; ++i) {
    task.split = splits[static_cast<size_t>(i)];
    for (task.kv_head = 0; task.kv_head < params_.num_kv_heads; ++task.kv_head) {
      task.partial = first + (task.kv_head * num_splits + i) * floats;
      tasks_.push_back(task);
    }
  }
}

void PagedAttention::run(int64_t index, Workspace& workspace) {
  const Task& task = tasks_[static_cast<size_t>(index)];
  const int64_t num_rows = task.num_queries * params_.group();
  const Softmax state = Softmax::in(partials_.get() + task.partial, num_rows);
  functions_.attend(params_, task, &state, workspace);
}

void PagedAttention::merge(int64_t index, Workspace& workspace) {
  const Merge& merge = merges_[static_cast<size_t>(index)];
  float* const splits = partials_.get() + merge.task.partial;
  functions_.merge(params_, merge.task, splits, merge.num_splits, workspace);
}

}  // namespace mk::attention
