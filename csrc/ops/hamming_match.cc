// torch.ops.mooncake_kernels.hamming_match: the torch binding of csrc/similarity/hamming_match.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "common/check.h"
#include "ops/cuda_stream.h"
#include "similarity/hamming_match.h"

namespace {

using mk::similarity::HammingMatchParams;
using mk::similarity::kMostBytes;
using mk::similarity::kMostTokens;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeInt = std::optional<int64_t>;

constexpr int64_t kMinThreadPairs = int64_t{1} << 20;  // smaller calls wake no thread

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
    mk::ops::on_cuda(queries,
                     [&](void* stream) { mk::similarity::launch_hamming_match(p, stream); });
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
  m.def(
      "hamming_match(Tensor queries, Tensor references, int? max_distance, int? window) -> "
      "(Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CPU, m) {
  m.impl("hamming_match", TORCH_BOX(&hamming_match));
}

#ifdef MK_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CUDA, m) {
  m.impl("hamming_match", TORCH_BOX(&hamming_match));
}
#endif
