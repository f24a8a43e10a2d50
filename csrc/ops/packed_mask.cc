// torch.ops.mooncake_kernels.mask_pack_rows and mask_pack_rule: the torch binding of
// csrc/mask/packed_mask.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "common/check.h"
#include "common/math.h"
#include "mask/packed_mask.h"
#include "ops/cuda_stream.h"
#include "ops/mask_inputs.h"

namespace {

using mk::mask::BatchLengths;
using mk::mask::BitsOfRows;
using mk::mask::BitsOfRule;
using mk::mask::PackedMaskParams;
using mk::ops::mask_data;
using mk::ops::MaybeTensor;
using mk::ops::rows_view;
using mk::ops::rule_params;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kMinThreadWords = 1 << 14;  // smaller calls wake no thread

void check_indptr(const BatchLengths& lengths, const int64_t* indptr, int64_t num_bytes) {
  for (int64_t i = 0; i < lengths.num_requests; ++i) {
    const int64_t q_len = lengths.q_len(i), kv_len = lengths.kv_lens[i];
    MK_CHECK(indptr[i + 1] - indptr[i] == mk::ceil_div(q_len * kv_len, int64_t{8}),
             "packed: indptr must have room for the pairs of request ", i, ", ", q_len,
             " queries by ", kv_len, " keys as batch says, got ", indptr[i + 1] - indptr[i],
             " bytes");
  }
  MK_CHECK(indptr[0] == 0 && indptr[lengths.num_requests] <= num_bytes,
           "packed: indptr must go from 0 to at most the bytes (", num_bytes, "), got ", indptr[0],
           " to ", indptr[lengths.num_requests]);
}

template <class Source>
void pack(const Source& source, const Tensor& cu_q, const Tensor& indptr, const Tensor& packed) {
  const int64_t num_words = packed.numel() / 4, requests = source.lengths().num_requests;
  MK_CHECK(packed.numel() % 4 == 0, "packed: packed must be whole words, got ", packed.numel());
  PackedMaskParams<Source> p{source, nullptr, num_words, nullptr};
  p.indptr = mask_data<int64_t>("indptr", indptr, ScalarType::Long, requests + 1, cu_q);
  p.packed = mask_data<uint8_t>("packed", packed, ScalarType::Byte, packed.numel(), cu_q);
#ifdef MK_WITH_CUDA
  if (cu_q.is_cuda()) {
    return mk::ops::on_cuda(cu_q, [&](void* stream) { mk::mask::launch_packed_mask(p, stream); });
  }
#endif
  check_indptr(source.lengths(), p.indptr, packed.numel());
  torch::stable::parallel_for(0, num_words, kMinThreadWords, [&](int64_t begin, int64_t end) {
    mk::mask::packed_mask_host(p, begin, end);
  });
}

void mask_pack_rows(Tensor intervals, Tensor tail_bits, Tensor tail_base, Tensor cu_q,
                    Tensor kv_lens, Tensor indptr, Tensor packed) {
  pack(BitsOfRows{rows_view(intervals, tail_bits, tail_base, cu_q, kv_lens)}, cu_q, indptr, packed);
}

void mask_pack_rule(Tensor program, Tensor cu_q, Tensor kv_lens, MaybeTensor positions,
                    int64_t num_q, Tensor indptr, Tensor packed) {
  pack(BitsOfRule{rule_params(program, cu_q, kv_lens, positions, num_q)}, cu_q, indptr, packed);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mooncake_kernels, m) {
  m.def(
      "mask_pack_rows(Tensor intervals, Tensor tail_bits, Tensor tail_base, Tensor cu_q, "
      "Tensor kv_lens, Tensor indptr, Tensor(a!) packed) -> ()");
  m.def(
      "mask_pack_rule(Tensor program, Tensor cu_q, Tensor kv_lens, Tensor? positions, int num_q, "
      "Tensor indptr, Tensor(a!) packed) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CPU, m) {
  m.impl("mask_pack_rows", TORCH_BOX(&mask_pack_rows));
  m.impl("mask_pack_rule", TORCH_BOX(&mask_pack_rule));
}

#ifdef MK_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CUDA, m) {
  m.impl("mask_pack_rows", TORCH_BOX(&mask_pack_rows));
  m.impl("mask_pack_rule", TORCH_BOX(&mask_pack_rule));
}
#endif
