// torch.ops.mooncake_kernels.paged_attention: the torch binding of
// csrc/attention/paged_attention.h. mooncake_kernels/attention/paged.py describes the arguments and
// checks what only Python sees.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <tuple>

#include "attention/paged_attention.h"
#include "common/check.h"
#include "ops/element_type.h"
#include "ops/packed.h"

namespace {

using mk::attention::PagedAttention;
using mk::attention::PagedAttentionParams;
using mk::attention::PagedCache;
using mk::attention::Workspace;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class T>
const T* packed(const Tensor& tensor, ScalarType type, int64_t numel, const char* name) {
  MK_CHECK(tensor.is_cpu(), "paged_attention: ", name, " must be on the CPU");
  return mk::ops::packed<const T>("paged_attention", name, tensor, type, numel, tensor);
}

PagedCache cache_of(const Tensor& tensor, const std::optional<Tensor>& scales, const char* name) {
  MK_CHECK(tensor.dim() == 4 && tensor.is_cpu() && (tensor.size(3) < 2 || tensor.stride(3) == 1),
           "paged_attention: ", name, " must be [block, token, head, dim] with dim packed");
  PagedCache cache{};
  cache.data = static_cast<const char*>(tensor.const_data_ptr());
  cache.type = mk::ops::element_type_of(tensor);
  const int64_t itemsize = mk::size_of(cache.type);
  cache.block_stride = tensor.stride(0) * itemsize;
  cache.token_stride = tensor.stride(1) * itemsize;
  cache.head_stride = tensor.stride(2) * itemsize;
  cache.dim = tensor.size(3);
  if (scales) cache.scales = packed<float>(*scales, ScalarType::Float, tensor.size(2), "a scale");
  return cache;
}

void check_lengths(const PagedAttentionParams& p, int64_t num_q, int64_t max_blocks) {
  const auto& [cu_q, kv_lens] = std::tie(p.mask.cu_q, p.mask.kv_lens);
  MK_CHECK(cu_q[0] == 0 && cu_q[p.num_requests] == num_q,
           "paged_attention: rows must be of as many queries as q (", num_q, "), got ",
           cu_q[p.num_requests]);
  for (int64_t i = 0; i < p.num_requests; ++i) {
    MK_CHECK(cu_q[i] <= cu_q[i + 1], "paged_attention: rows must have ascending cu_q, got ",
             cu_q[i + 1], " after ", cu_q[i]);
    MK_CHECK(kv_lens[i] <= max_blocks * p.block_size,
             "paged_attention: block_table must have blocks for ", kv_lens[i], " keys of request ",
             i, ", got ", max_blocks, " blocks of ", p.block_size);
  }
}

// MaskBuilder.build leaves such rows; other calls that make rows refuse them.
void check_fit(const PagedAttentionParams& p, int64_t num_q) {
  const int32_t* const intervals = p.mask.intervals;
  for (int64_t row = 0; row < num_q; ++row) {
    const int32_t* const ends = intervals + 4 * row;
    MK_CHECK(ends[1] >= 0,
             "paged_attention: rows must be of a rule that fits them, got intervals of [", ends[0],
             ", ", ends[1], ", ", ends[2], ", ", ends[3], "] in row ", row,
             ": MaskBuilder.raise_if_unfit says why");
  }
}

// Each thread takes the next task when it has finished one.
template <class Run>
void for_each_task(int64_t count, const Run& run) {
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(torch::stable::get_num_threads(), count);
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    Workspace workspace;
    for (int64_t i = next++; i < count; i = next++) run(i, workspace);
  });
}

void check_entries(const PagedAttentionParams& p, const Tensor& block_table) {
  const int64_t bad = *p.bad_entry;
  if (bad == mk::attention::kNoEntry) return;
  const int64_t request = bad / p.table_stride, entry = bad % p.table_stride;
  MK_CHECK(false, "paged_attention: block_table[", request, ", ", entry, "] must be in [0, ",
           p.num_blocks, "), for its keys are seen, got ", p.block_table[bad]);
}

std::tuple<Tensor, Tensor> paged_attention_cpu(Tensor q, Tensor k_cache, Tensor v_cache,
                                               Tensor block_table, Tensor intervals,
                                               Tensor tail_bits, Tensor tail_base, Tensor cu_q,
                                               Tensor kv_lens, double scale,
                                               std::optional<Tensor> k_scale,
                                               std::optional<Tensor> v_scale) {
  PagedAttentionParams p{};
  MK_CHECK(q.dim() == 3 && q.is_cpu() && (q.size(2) < 2 || q.stride(2) == 1),
           "paged_attention: q must be [num_q, heads, dim] with dim packed");
  const int64_t num_q = q.size(0);
  p.q = static_cast<const char*>(q.const_data_ptr());
  p.q_type = mk::ops::element_type_of(q);
  p.q_row_stride = q.stride(0) * mk::size_of(p.q_type);
  p.q_head_stride = q.stride(1) * mk::size_of(p.q_type);
  p.k = cache_of(k_cache, k_scale, "k_cache");
  p.v = cache_of(v_cache, v_scale, "v_cache");
  p.num_requests = kv_lens.numel();
  p.num_heads = q.size(1);
  p.num_kv_heads = k_cache.size(2);
  p.num_blocks = k_cache.size(0);
  p.block_size = k_cache.size(1);
  for (int i = 0; i < 3; ++i) {
    MK_CHECK(k_cache.size(i) == v_cache.size(i),
             "paged_attention: v_cache must have the shape of "
             "k_cache but for dim, got ",
             v_cache.size(i), " at axis ", i);
  }
  MK_CHECK(p.k.dim == q.size(2) && p.k.dim > 0 && p.v.dim > 0 && p.block_size > 0,
           "paged_attention: k_cache must have rows of ", q.size(2), " elements, as q, got ",
           p.k.dim);
  MK_CHECK(p.num_kv_heads > 0 && p.num_heads > 0 && p.num_heads % p.num_kv_heads == 0,
           "paged_attention: q must have a multiple of the ", p.num_kv_heads,
           " heads of k_cache, got ", p.num_heads);
  MK_CHECK(block_table.dim() == 2 && block_table.size(0) == p.num_requests,
           "paged_attention: block_table must be [", p.num_requests, ", max_blocks]");
  p.table_stride = block_table.size(1);
  p.block_table =
      packed<int32_t>(block_table, ScalarType::Int, p.num_requests * p.table_stride, "block_table");
  p.mask.intervals = packed<int32_t>(intervals, ScalarType::Int, num_q * 4, "intervals");
  p.mask.tail_bits = packed<int64_t>(tail_bits, ScalarType::Long, num_q, "tail_bits");
  p.mask.tail_base = packed<int32_t>(tail_base, ScalarType::Int, p.num_requests, "tail_base");
  p.mask.cu_q = packed<int32_t>(cu_q, ScalarType::Int, p.num_requests + 1, "cu_q");
  p.mask.kv_lens = packed<int32_t>(kv_lens, ScalarType::Int, p.num_requests, "kv_lens");
  check_lengths(p, num_q, p.table_stride);
  check_fit(p, num_q);
  p.scale = static_cast<float>(scale);

  Tensor out = torch::stable::new_empty(q, {num_q, p.num_heads, p.v.dim});
  Tensor lse = torch::stable::new_empty(q, {num_q, p.num_heads}, ScalarType::Float);
  p.out = static_cast<char*>(out.mutable_data_ptr());
  p.lse = static_cast<float*>(lse.mutable_data_ptr());
  std::atomic<int64_t> bad_entry{mk::attention::kNoEntry};
  p.bad_entry = &bad_entry;

  PagedAttention attention(p);
  for_each_task(attention.num_tasks(), [&](int64_t i, Workspace& w) { attention.run(i, w); });
  check_entries(p, block_table);
  for_each_task(attention.num_merges(), [&](int64_t i, Workspace& w) { attention.merge(i, w); });
  return {out, lse};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mooncake_kernels, m) {
  m.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
      "Tensor intervals, Tensor tail_bits, Tensor tail_base, Tensor cu_q, Tensor kv_lens, "
      "float scale, Tensor? k_scale, Tensor? v_scale) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CPU, m) {
  m.impl("paged_attention", TORCH_BOX(&paged_attention_cpu));
}
