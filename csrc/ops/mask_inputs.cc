#include "ops/mask_inputs.h"

#include "common/check.h"

namespace mk::ops {
namespace {

using mask::BatchLengths;
using mask::MaskRowsParams;
using mask::MaskRowsView;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A batch's lengths. Its tensors may have been written to since it was made, so those on the CPU
// are checked here: rows beyond num_rows, or queries without a key, would be outside the other
// tensors.
BatchLengths lengths_of(const Tensor& cu_q, const Tensor& kv_lens, int64_t num_rows) {
  const int64_t num_requests = kv_lens.numel();
  const BatchLengths lengths{
      mask_data<int32_t>("cu_q", cu_q, ScalarType::Int, num_requests + 1, cu_q),
      mask_data<int32_t>("kv_lens", kv_lens, ScalarType::Int, num_requests, cu_q), num_requests};
  if (cu_q.is_cuda()) return lengths;
  MK_CHECK(lengths.cu_q[0] == 0 && lengths.num_q() <= num_rows,
           "mask: batch.cu_q must go from 0 to at most the rows (", num_rows, "), got ",
           lengths.cu_q[0], " to ", lengths.num_q());
  for (int64_t i = 0; i < num_requests; ++i) {
    MK_CHECK(lengths.cu_q[i] <= lengths.cu_q[i + 1], "mask: batch.cu_q must not decrease, got ",
             lengths.cu_q[i + 1], " after ", lengths.cu_q[i]);
  }
  for (int64_t i = 0; i < num_requests; ++i) {
    MK_CHECK(lengths.kv_lens[i] >= lengths.q_len(i),
             "mask: batch.kv_lens must be at least the queries of request ", i, " (",
             lengths.q_len(i), "), got ", lengths.kv_lens[i]);
  }
  return lengths;
}

// Likewise: an operation would look up what a rule's tables do not have.
void check_positions(const MaskRowsParams& p) {
  if (!p.positions) return;
  for (int64_t i = 0; i < p.lengths.num_requests; ++i) {
    for (int64_t row = p.lengths.cu_q[i]; row < p.lengths.cu_q[i + 1]; ++row) {
      MK_CHECK(p.positions[row] >= 0 && p.positions[row] < p.lengths.kv_lens[i],
               "mask: batch.positions[", row, "] must be in [0, ", p.lengths.kv_lens[i],
               "), the keys of its request, got ", p.positions[row]);
    }
  }
}

}  // namespace

MaskRowsParams rule_params(const Tensor& program, const Tensor& cu_q, const Tensor& kv_lens,
                           const MaybeTensor& positions, int64_t num_rows) {
  MaskRowsParams p{};
  p.program = mask_data<int32_t>("program", program, ScalarType::Int, program.numel(), cu_q);
  p.lengths = lengths_of(cu_q, kv_lens, num_rows);
  p.positions = mask_data<int32_t>("positions", positions, ScalarType::Int, num_rows, cu_q);
  p.num_rows = num_rows;
  if (!cu_q.is_cuda()) check_positions(p);
  return p;
}

MaskRowsView rows_view(const Tensor& intervals, const Tensor& tail_bits, const Tensor& tail_base,
                       const Tensor& cu_q, const Tensor& kv_lens) {
  const int64_t rows = tail_bits.numel();
  return {mask_data<int32_t>("intervals", intervals, ScalarType::Int, 4 * rows, cu_q),
          mask_data<int64_t>("tail_bits", tail_bits, ScalarType::Long, rows, cu_q),
          mask_data<int32_t>("tail_base", tail_base, ScalarType::Int, kv_lens.numel(), cu_q),
          lengths_of(cu_q, kv_lens, rows)};
}

}  // namespace mk::ops
