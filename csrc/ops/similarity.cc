// torch.ops.mooncake_kernels.pack_signs and hamming_match: the torch binding of csrc/similarity.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "common/check.h"
#include "ops/cuda_stream.h"
#include "similarity/hamming_match.h"
#include "similarity/pack_signs.h"

namespace {

using mk::similarity::HammingMatchParams;
using mk::similarity::kMostBytes;
using mk::similarity::kMostTokens;
using mk::similarity::PackSignsParams;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeInt = std::optional<int64_t>;

constexpr int64_t kMinThreadSignBytes = int64_t{16} << 10;  // smaller calls wake no thread
constexpr int64_t kMinThreadPairs = int64_t{1} << 20;

#ifdef MK_WITH_CUDA
// Calls `launch` with torch's current stream on the tensor's device.
template <class Launch>
void on_cuda(const Tensor& where, const Launch& launch) {
  const int32_t device = where.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  launch(mk::ops::current_cuda_stream(device));
}
#endif

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
    on_cuda(values, [&](void* stream) { mk::similarity::launch_pack_signs(p, stream); });
    return packed;
  }
#endif
  torch::stable::parallel_for(
      0, p.num_bytes, kMinThreadSignBytes,
      [&p](int64_t begin, int64_t end) { mk::similarity::pack_signs_host(p, begin, end); });
  return packed;
}

void check_signatures(const char* name, const Tensor& signatures) {
  MK_CHECK(signatures.dim() == 2 && signatures.scalar_type() == ScalarType::Byte &&
               signatures.is_contiguous(),
           "hamming_match: ", name, " must be packed uint8 [num_tokens, num_bytes]");
  MK_CHECK(signatures.size(0) <= kMostTokens, "hamming_match: ", name, " must have at most ",
           kMostTokens, " tokens, got ", signatures.size(0));
  MK_CHECK(signatures.size(1) > 0 && signatures.size(1) <= kMostBytes, "hamming_match: ", name,
           " must have 1 to ", kMostBytes, " bytes a token, got ", signatures.size(1));
}

std::tuple<Tensor, Tensor> hamming_match(Tensor queries, Tensor references, MaybeInt max_distance,
                                         MaybeInt window) {
  check_signatures("query_sig", queries);
  check_signatures("reference_sig", references);
  MK_CHECK(references.size(1) == queries.size(1) && references.get_device() == queries.get_device(),
           "hamming_match: reference_sig must have as many bytes a token as query_sig, ",
           queries.size(1), ", and be on its device, got ", references.size(1));
  MK_CHECK(max_distance.value_or(0) >= 0 && window.value_or(0) >= 0,
           "hamming_match: max_distance and window must not be negative");
  Tensor index = torch::stable::new_empty(queries, {queries.size(0)}, ScalarType::Long);
  Tensor distance = torch::stable::new_empty(queries, {queries.size(0)}, ScalarType::Int);
  HammingMatchParams p{};
  p.queries = static_cast<const uint8_t*>(queries.const_data_ptr());
  p.references = static_cast<const uint8_t*>(references.const_data_ptr());
  p.index = static_cast<int64_t*>(index.mutable_data_ptr());
  p.distance = static_cast<int32_t*>(distance.mutable_data_ptr());
  p.num_queries = queries.size(0);
  p.num_references = references.size(0);
  p.num_bytes = queries.size(1);
  p.max_distance = std::min(max_distance.value_or(8 * p.num_bytes), 8 * p.num_bytes);
  p.window = std::min(window.value_or(kMostTokens), kMostTokens);
#ifdef MK_WITH_CUDA
  if (queries.is_cuda()) {
    on_cuda(queries, [&](void* stream) { mk::similarity::launch_hamming_match(p, stream); });
    return {index, distance};
  }
#endif
  const int64_t pairs = std::min(p.num_references, 2 * p.window + 1) + 1;  // per query
  torch::stable::parallel_for(
      0, p.num_queries, std::max<int64_t>(kMinThreadPairs / pairs, 1),
      [&p](int64_t begin, int64_t end) { mk::similarity::hamming_match_host(p, begin, end); });
  return {index, distance};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mooncake_kernels, m) {
  m.def("pack_signs(Tensor values) -> Tensor");
  m.def(
      "hamming_match(Tensor queries, Tensor references, int? max_distance, int? window) -> "
      "(Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CPU, m) {
  m.impl("pack_signs", TORCH_BOX(&pack_signs));
  m.impl("hamming_match", TORCH_BOX(&hamming_match));
}

#ifdef MK_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CUDA, m) {
  m.impl("pack_signs", TORCH_BOX(&pack_signs));
  m.impl("hamming_match", TORCH_BOX(&hamming_match));
}
#endif
