// torch.ops.mooncake_kernels.append_kv: the torch binding of csrc/attention/append_kv.h.
// Properties visible only to Python are checked in mooncake_kernels/attention/append.py.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>

#include "attention/append_kv.h"
#include "common/check.h"
#include "ops/element_type.h"
#include "ops/packed.h"

namespace {

using mk::attention::AppendParams;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

constexpr int64_t kMinThreadElements = int64_t{64} << 10;  // smaller calls wake no thread

AppendParams params_of(const Tensor& rows, const Tensor& cache, const Tensor& slots,
                       const Optional& scales) {
  MK_CHECK(rows.dim() == 3 && cache.dim() == 4 && rows.is_cpu() && cache.is_cpu() &&
               rows.size(0) == slots.numel() && rows.size(1) == cache.size(2) &&
               rows.size(2) == cache.size(3) && (rows.size(2) < 2 || rows.stride(2) == 1) &&
               (rows.size(2) < 2 || cache.stride(3) == 1),
           "append_kv: rows must be [token, head, dim] of a cache [block, token, head, dim]");
  AppendParams p{};
  p.src = static_cast<const char*>(rows.const_data_ptr());
  p.src_type = mk::ops::element_type_of(rows);
  p.src_token_stride = rows.stride(0) * mk::size_of(p.src_type);
  p.src_head_stride = rows.stride(1) * mk::size_of(p.src_type);
  p.cache = static_cast<char*>(cache.mutable_data_ptr());
  p.cache_type = mk::ops::element_type_of(cache);
  const int64_t itemsize = mk::size_of(p.cache_type);
  p.block_stride = cache.stride(0) * itemsize;
  p.token_stride = cache.stride(1) * itemsize;
  p.head_stride = cache.stride(2) * itemsize;
  p.block_size = cache.size(1);
  p.num_heads = cache.size(2);
  p.dim = cache.size(3);
  p.num_tokens = slots.numel();
  p.slots = static_cast<const int64_t*>(slots.const_data_ptr());
  p.scales = mk::ops::packed<const float>("append_kv", "a scale", scales, ScalarType::Float,
                                          p.num_heads, slots);
  return p;
}

void append(const AppendParams& p) {
  const int64_t elements = std::max<int64_t>(p.num_heads * p.dim, 1);
  torch::stable::parallel_for(
      0, p.num_tokens, std::max<int64_t>(kMinThreadElements / elements, 1),
      [&p](int64_t begin, int64_t end) { mk::attention::append_rows_host(p, begin, end); });
}

void check_slots(const Tensor& slots, int64_t num_slots) {
  MK_CHECK(slots.dim() == 1 && slots.scalar_type() == ScalarType::Long && slots.is_cpu() &&
               slots.is_contiguous(),
           "append_kv: slots must be packed int64 [n] on the CPU");
  const auto* const values = static_cast<const int64_t*>(slots.const_data_ptr());
  for (int64_t i = 0; i < slots.numel(); ++i) {
    MK_CHECK(values[i] >= -1 && values[i] < num_slots, "append_kv: slots[", i,
             "] must be -1 or in [0, ", num_slots, "), got ", values[i]);
  }
}

void append_kv_cpu(Tensor k, Optional v, Tensor k_cache, Optional v_cache, Tensor slots,
                   Optional cos_sin, int64_t rope_first, bool rope_interleaved, Optional k_scale,
                   Optional v_scale) {
  check_slots(slots, k_cache.size(0) * k_cache.size(1));
  MK_CHECK(v.has_value() == v_cache.has_value(), "append_kv: v and v_cache must come together");
  AppendParams keys = params_of(k, k_cache, slots, k_scale);
  if (cos_sin) {
    MK_CHECK(cos_sin->dim() == 3, "append_kv: cos_sin must be [token, 2, pairs]");
    const int64_t num_pairs = cos_sin->size(2);
    MK_CHECK(rope_first >= 0 && rope_first + 2 * num_pairs <= keys.dim,
             "append_kv: rope must turn elements inside a row");
    const int64_t num_angles = keys.num_tokens * 2 * num_pairs;
    keys.rotation = {mk::ops::packed<const float>("append_kv", "cos_sin", cos_sin,
                                                  ScalarType::Float, num_angles, slots),
                     rope_first, num_pairs, rope_interleaved};
  }
  if (v) {
    MK_CHECK(v_cache->size(0) == k_cache.size(0) && v_cache->size(1) == k_cache.size(1),
             "append_kv: v_cache must have the blocks of k_cache");
    append(params_of(*v, *v_cache, slots, v_scale));
  }
  append(keys);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mooncake_kernels, m) {
  m.def(
      "append_kv(Tensor k, Tensor? v, Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor slots, "
      "Tensor? cos_sin, int rope_first, bool rope_interleaved, Tensor? k_scale, Tensor? v_scale) "
      "-> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CPU, m) {
  m.impl("append_kv", TORCH_BOX(&append_kv_cpu));
}
