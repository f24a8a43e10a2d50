// torch.ops.mooncake_kernels.merge_attention: the torch binding of
// csrc/attention/merge_attention.h.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <tuple>

#include "attention/merge_attention.h"
#include "common/check.h"
#include "ops/cuda_stream.h"
#include "ops/element_type.h"

namespace {

using mk::attention::MergeAttentionParams;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kMinThreadElements = int64_t{64} << 10;  // smaller calls wake no thread

struct Merge {
  Tensor out;
  Tensor lse;
  MergeAttentionParams params;
};

Merge merge_of(const Tensor& outs, const Tensor& lses, bool is_log2) {
  MK_CHECK(outs.dim() == 4 && outs.size(0) > 0,
           "merge_attention: outs must be [n, num_q, heads, dim] with n >= 1");
  MK_CHECK(lses.dim() == 3 && lses.scalar_type() == ScalarType::Float,
           "merge_attention: lses must be float32 [n, num_q, heads]");
  for (int i = 0; i < 3; ++i) {
    MK_CHECK(lses.size(i) == outs.size(i), "merge_attention: lses must have the shape of outs (",
             outs.size(i), " at axis ", i, "), got ", lses.size(i));
  }
  MK_CHECK(outs.is_contiguous() && lses.is_contiguous() && outs.is_cpu() == lses.is_cpu(),
           "merge_attention: outs and lses must be packed and on one device");
  Merge merge{torch::stable::new_empty(outs, {outs.size(1), outs.size(2), outs.size(3)}),
              torch::stable::new_empty(lses, {outs.size(1), outs.size(2)}),
              {}};
  MergeAttentionParams& p = merge.params;
  p.outs = static_cast<const char*>(outs.const_data_ptr());
  p.lses = static_cast<const float*>(lses.const_data_ptr());
  p.out = static_cast<char*>(merge.out.mutable_data_ptr());
  p.lse = static_cast<float*>(merge.lse.mutable_data_ptr());
  p.num_parts = outs.size(0);
  p.num_rows = outs.size(1) * outs.size(2);
  p.dim = outs.size(3);
  p.type = mk::ops::element_type_of(outs);
  MK_CHECK(mk::size_of(p.type) > 1, "merge_attention: outs must not be fp8");
  p.is_log2 = is_log2;
  return merge;
}

std::tuple<Tensor, Tensor> merge_attention_cpu(Tensor outs, Tensor lses, bool is_log2) {
  const Merge merge = merge_of(outs, lses, is_log2);
  const MergeAttentionParams& p = merge.params;
  const int64_t elements = std::max<int64_t>(p.num_parts * p.dim, 1);
  torch::stable::parallel_for(
      0, p.num_rows, std::max<int64_t>(kMinThreadElements / elements, 1),
      [&p](int64_t begin, int64_t end) { mk::attention::merge_attention_host(p, begin, end); });
  return {merge.out, merge.lse};
}

#ifdef MK_WITH_CUDA
std::tuple<Tensor, Tensor> merge_attention_cuda(Tensor outs, Tensor lses, bool is_log2) {
  const int32_t device = outs.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Merge merge = merge_of(outs, lses, is_log2);
  mk::attention::launch_merge_attention(merge.params, mk::ops::current_cuda_stream(device));
  return {merge.out, merge.lse};
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mooncake_kernels, m) {
  m.def("merge_attention(Tensor outs, Tensor lses, bool log2) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CPU, m) {
  m.impl("merge_attention", TORCH_BOX(&merge_attention_cpu));
}

#ifdef MK_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CUDA, m) {
  m.impl("merge_attention", TORCH_BOX(&merge_attention_cuda));
}
#endif
