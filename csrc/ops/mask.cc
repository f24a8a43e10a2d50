// torch.ops.mooncake_kernels.mask_rows, mask_block_map, mask_pack_rows and mask_pack_rule: the
// torch binding of csrc/mask.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "common/check.h"
#include "common/math.h"
#include "mask/block_map.h"
#include "mask/packed_mask.h"
#include "ops/cuda_stream.h"
#include "ops/packed.h"

namespace {

using mk::mask::BatchLengths;
using mk::mask::BitsOfRows;
using mk::mask::BitsOfRule;
using mk::mask::BlockMapParams;
using mk::mask::MaskRowsParams;
using mk::mask::MaskRowsView;
using mk::mask::PackedMaskParams;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Tensors = std::vector<Tensor>;

constexpr int64_t kMinThreadRows = 1024;  // smaller calls wake no thread
constexpr int64_t kMinThreadBlocks = 8;
constexpr int64_t kMinThreadWords = 1 << 14;

template <class T, class AnyTensor>
T* data_of(const char* name, const AnyTensor& tensor, ScalarType type, int64_t count,
           const Tensor& where) {
  return mk::ops::packed<T>("mask", name, tensor, type, count, where);
}

// A batch's lengths. Its tensors may have been written to since it was made, so those on the CPU
// are checked here: rows beyond num_rows, or queries without a key, would be outside the other
// tensors.
BatchLengths lengths_of(const Tensor& cu_q, const Tensor& kv_lens, int64_t num_rows) {
  const int64_t num_requests = kv_lens.numel();
  const BatchLengths lengths{
      data_of<int32_t>("cu_q", cu_q, ScalarType::Int, num_requests + 1, cu_q),
      data_of<int32_t>("kv_lens", kv_lens, ScalarType::Int, num_requests, cu_q), num_requests};
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

// A rule over a batch; outputs are left unset.
MaskRowsParams rule_params(const Tensor& program, const Tensor& cu_q, const Tensor& kv_lens,
                           const MaybeTensor& positions, int64_t num_rows) {
  MaskRowsParams p{};
  p.program = data_of<int32_t>("program", program, ScalarType::Int, program.numel(), cu_q);
  p.lengths = lengths_of(cu_q, kv_lens, num_rows);
  p.positions = data_of<int32_t>("positions", positions, ScalarType::Int, num_rows, cu_q);
  p.num_rows = num_rows;
  if (!cu_q.is_cuda()) check_positions(p);
  return p;
}

MaskRowsView rows_view(const Tensor& intervals, const Tensor& tail_bits, const Tensor& tail_base,
                       const Tensor& cu_q, const Tensor& kv_lens) {
  const int64_t rows = tail_bits.numel();
  return {data_of<int32_t>("intervals", intervals, ScalarType::Int, 4 * rows, cu_q),
          data_of<int64_t>("tail_bits", tail_bits, ScalarType::Long, rows, cu_q),
          data_of<int32_t>("tail_base", tail_base, ScalarType::Int, kv_lens.numel(), cu_q),
          lengths_of(cu_q, kv_lens, rows)};
}

#ifdef MK_WITH_CUDA
// Calls `launch` with torch's current stream on the tensor's device.
template <class Launch>
void on_cuda(const Tensor& where, const Launch& launch) {
  const int32_t device = where.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  launch(mk::ops::current_cuda_stream(device));
}
#endif

void mask_rows(Tensor program, Tensor cu_q, Tensor kv_lens, MaybeTensor positions, Tensor intervals,
               Tensor tail_bits, Tensor tail_base) {
  const int64_t rows = tail_bits.numel();
  MaskRowsParams p = rule_params(program, cu_q, kv_lens, positions, rows);
  p.intervals = data_of<int32_t>("intervals", intervals, ScalarType::Int, 4 * rows, cu_q);
  p.tail_bits = data_of<int64_t>("tail_bits", tail_bits, ScalarType::Long, rows, cu_q);
  p.tail_base = data_of<int32_t>("tail_base", tail_base, ScalarType::Int, kv_lens.numel(), cu_q);
#ifdef MK_WITH_CUDA
  if (cu_q.is_cuda()) {
    return on_cuda(cu_q, [&](void* stream) { mk::mask::launch_mask_rows(p, stream); });
  }
#endif
  for (int64_t b = 0; b < p.lengths.num_requests; ++b) p.fill_request(b);
  torch::stable::parallel_for(0, rows, kMinThreadRows, [&](int64_t begin, int64_t end) {
    mk::mask::mask_rows_host(p, begin, end);
  });
}

void mask_block_map(Tensor intervals, Tensor tail_bits, Tensor tail_base, Tensor cu_q,
                    Tensor kv_lens, int64_t block_q, int64_t block_kv, bool whole,
                    int64_t num_q_blocks, MaybeTensor cu_q_blocks, MaybeTensor ranges,
                    MaybeTensor counts, Tensors indices, Tensors begins,
                    std::vector<int64_t> kinds) {
  MK_CHECK(block_q > 0 && block_kv > 0, "block_map: block_q and block_kv must be positive");
  MK_CHECK(indices.size() <= mk::mask::kMaxLists && begins.size() == indices.size() &&
               kinds.size() == indices.size(),
           "block_map: indices, begins and kinds must be as many, at most ", mk::mask::kMaxLists);
  BlockMapParams p{};
  p.rows = rows_view(intervals, tail_bits, tail_base, cu_q, kv_lens);
  p.block_q = block_q;
  p.block_kv = block_kv;
  p.whole = whole;
  p.num_q_blocks = num_q_blocks;
  p.cu_q_blocks = data_of<int32_t>("cu_q_blocks", cu_q_blocks, ScalarType::Int, cu_q.numel(), cu_q);
  p.ranges = data_of<int32_t>("ranges", ranges, ScalarType::Int, 4 * num_q_blocks, cu_q);
  p.counts = data_of<int32_t>("counts", counts, ScalarType::Int, 2 * num_q_blocks, cu_q);
  p.num_lists = static_cast<int32_t>(indices.size());
  for (size_t i = 0; i < indices.size(); ++i) {
    // Without begins, each q-block has a row of equal width.
    const int64_t size = indices[i].numel();
    const bool has_begins = begins[i].numel() > 0;
    MK_CHECK(has_begins || num_q_blocks == 0 || size % num_q_blocks == 0,
             "block_map: indices must be rows of one width a q-block, got ", size);
    p.lists[i] = {data_of<int32_t>("indices", indices[i], ScalarType::Int, size, cu_q), size,
                  has_begins
                      ? data_of<int64_t>("begins", begins[i], ScalarType::Long, num_q_blocks, cu_q)
                      : nullptr,
                  num_q_blocks > 0 ? size / num_q_blocks : 0, static_cast<int32_t>(kinds[i])};
  }
#ifdef MK_WITH_CUDA
  if (cu_q.is_cuda()) {
    return on_cuda(cu_q, [&](void* stream) { mk::mask::launch_block_map(p, stream); });
  }
#endif
  mk::mask::fill_cu_q_blocks(p);
  torch::stable::parallel_for(0, num_q_blocks, kMinThreadBlocks, [&](int64_t begin, int64_t end) {
    mk::mask::block_map_host(p, begin, end);
  });
}

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
  p.indptr = data_of<int64_t>("indptr", indptr, ScalarType::Long, requests + 1, cu_q);
  p.packed = data_of<uint8_t>("packed", packed, ScalarType::Byte, packed.numel(), cu_q);
#ifdef MK_WITH_CUDA
  if (cu_q.is_cuda()) {
    return on_cuda(cu_q, [&](void* stream) { mk::mask::launch_packed_mask(p, stream); });
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
      "mask_rows(Tensor program, Tensor cu_q, Tensor kv_lens, Tensor? positions, "
      "Tensor(a!) intervals, Tensor(b!) tail_bits, Tensor(c!) tail_base) -> ()");
  m.def(
      "mask_block_map(Tensor intervals, Tensor tail_bits, Tensor tail_base, Tensor cu_q, "
      "Tensor kv_lens, int block_q, int block_kv, bool whole, int num_q_blocks, "
      "Tensor(a!)? cu_q_blocks, Tensor(b!)? ranges, Tensor(c!)? counts, Tensor(d!)[] indices, "
      "Tensor[] begins, int[] kinds) -> ()");
  m.def(
      "mask_pack_rows(Tensor intervals, Tensor tail_bits, Tensor tail_base, Tensor cu_q, "
      "Tensor kv_lens, Tensor indptr, Tensor(a!) packed) -> ()");
  m.def(
      "mask_pack_rule(Tensor program, Tensor cu_q, Tensor kv_lens, Tensor? positions, int num_q, "
      "Tensor indptr, Tensor(a!) packed) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CPU, m) {
  m.impl("mask_rows", TORCH_BOX(&mask_rows));
  m.impl("mask_block_map", TORCH_BOX(&mask_block_map));
  m.impl("mask_pack_rows", TORCH_BOX(&mask_pack_rows));
  m.impl("mask_pack_rule", TORCH_BOX(&mask_pack_rule));
}

#ifdef MK_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CUDA, m) {
  m.impl("mask_rows", TORCH_BOX(&mask_rows));
  m.impl("mask_block_map", TORCH_BOX(&mask_block_map));
  m.impl("mask_pack_rows", TORCH_BOX(&mask_pack_rows));
  m.impl("mask_pack_rule", TORCH_BOX(&mask_pack_rule));
}
#endif
