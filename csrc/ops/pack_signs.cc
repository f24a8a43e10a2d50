// torch.ops.mooncake_kernels.pack_signs: the torch binding of csrc/similarity/pack_signs.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "common/check.h"
#include "ops/cuda_stream.h"
#include "similarity/pack_signs.h"

namespace {

using mk::similarity::PackSignsParams;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kMinThreadBytes = int64_t{16} << 10;  // smaller calls wake no thread

Tensor pack_signs(Tensor values) {
  MK_CHECK(values.dim() == 2 && values.scalar_type() == ScalarType::Float &&
               values.is_contiguous() && values.size(1) % 8 == 0,
           "pack_signs: values must be packed float32 [num_tokens, bits], bits a multiple of 8");
  const int64_t num_bytes = values.size(1) / 8;
  Tensor packed = torch::stable::new_empty(values, {values.size(0), num_bytes}, ScalarType::Byte);
  const PackSignsParams p{static_cast<const float*>(values.const_data_ptr()),
                          static_cast<uint8_t*>(packed.mutable_data_ptr()),
                          values.size(0) * num_bytes};
#ifdef MK_WITH_CUDA
  if (values.is_cuda()) {
    mk::ops::on_cuda(values, [&](void* stream) { mk::similarity::launch_pack_signs(p, stream); });
    return packed;
  }
#endif
  torch::stable::parallel_for(0, p.num_bytes, kMinThreadBytes, [&p](int64_t begin, int64_t end) {
    mk::similarity::pack_signs_host(p, begin, end);
  });
  return packed;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mooncake_kernels, m) { m.def("pack_signs(Tensor values) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CPU, m) {
  m.impl("pack_signs", TORCH_BOX(&pack_signs));
}

#ifdef MK_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CUDA, m) {
  m.impl("pack_signs", TORCH_BOX(&pack_signs));
}
#endif
