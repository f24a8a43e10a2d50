// torch.ops.mooncake_kernels.mask_rows: the torch binding of csrc/mask/mask_rows.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "mask/mask_rows.h"
#include "ops/cuda_stream.h"
#include "ops/mask_inputs.h"

namespace {

using mk::mask::MaskRowsParams;
using mk::ops::mask_data;
using mk::ops::MaybeTensor;
using mk::ops::rule_params;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kMinThreadRows = 1024;  // smaller calls wake no thread

void mask_rows(Tensor program, Tensor cu_q, Tensor kv_lens, MaybeTensor positions, Tensor intervals,
               Tensor tail_bits, Tensor tail_base) {
  const int64_t rows = tail_bits.numel();
  MaskRowsParams p = rule_params(program, cu_q, kv_lens, positions, rows);
  p.intervals = mask_data<int32_t>("intervals", intervals, ScalarType::Int, 4 * rows, cu_q);
  p.tail_bits = mask_data<int64_t>("tail_bits", tail_bits, ScalarType::Long, rows, cu_q);
  p.tail_base = mask_data<int32_t>("tail_base", tail_base, ScalarType::Int, kv_lens.numel(), cu_q);
#ifdef MK_WITH_CUDA
  if (cu_q.is_cuda()) {
    return mk::ops::on_cuda(cu_q, [&](void* stream) { mk::mask::launch_mask_rows(p, stream); });
  }
#endif
  for (int64_t b = 0; b < p.lengths.num_requests; ++b) p.fill_request(b);
  torch::stable::parallel_for(0, rows, kMinThreadRows, [&](int64_t begin, int64_t end) {
    mk::mask::mask_rows_host(p, begin, end);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mooncake_kernels, m) {
  m.def(
      "mask_rows(Tensor program, Tensor cu_q, Tensor kv_lens, Tensor? positions, "
      "Tensor(a!) intervals, Tensor(b!) tail_bits, Tensor(c!) tail_base) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CPU, m) { m.impl("mask_rows", TORCH_BOX(&mask_rows)); }

#ifdef MK_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CUDA, m) { m.impl("mask_rows", TORCH_BOX(&mask_rows)); }
#endif
