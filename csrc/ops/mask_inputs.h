// What operators on masks are given: a batch, and its rows or the rule that makes them.
//
// Layer: ops.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "mask/mask_rows.h"
#include "ops/packed.h"

namespace mk::ops {

using MaybeTensor = std::optional<torch::stable::Tensor>;

template <class T, class AnyTensor>
T* mask_data(const char* name, const AnyTensor& tensor, torch::headeronly::ScalarType type,
             int64_t count, const torch::stable::Tensor& where) {
  return packed<T>("mask", name, tensor, type, count, where);
}

// A rule over a batch; outputs are left unset.
mask::MaskRowsParams rule_params(const torch::stable::Tensor& program,
                                 const torch::stable::Tensor& cu_q,
                                 const torch::stable::Tensor& kv_lens, const MaybeTensor& positions,
                                 int64_t num_rows);

// The rows of a batch.
mask::MaskRowsView rows_view(const torch::stable::Tensor& intervals,
                             const torch::stable::Tensor& tail_bits,
                             const torch::stable::Tensor& tail_base,
                             const torch::stable::Tensor& cu_q,
                             const torch::stable::Tensor& kv_lens);

}  // namespace mk::ops
