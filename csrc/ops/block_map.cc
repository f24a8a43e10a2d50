// torch.ops.mooncake_kernels.mask_block_map: the torch binding of csrc/mask/block_map.h.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <vector>

#include "common/check.h"
#include "mask/block_map.h"
#include "ops/cuda_stream.h"
#include "ops/mask_inputs.h"

namespace {

using mk::mask::BlockMapParams;
using mk::ops::mask_data;
using mk::ops::MaybeTensor;
using mk::ops::rows_view;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;

constexpr int64_t kMinThreadBlocks = 8;  // smaller calls wake no thread

void mask_block_map(Tensor intervals, Tensor tail_bits, Tensor tail_base, Tensor cu_q,
                    Tensor kv_lens, int64_t block_q, int64_t block_kv, bool whole,
                    int64_t num_q_blocks, MaybeTensor cu_q_blocks, MaybeTensor ranges,
                    MaybeTensor counts, Tensors indices, Tensors begins,
                    std::vector<int64_t> kinds) {
  MK_CHECK(block_q > 0 && block_kv > 0, "block_map: block_q and block_kv must be positive");
  MK_CHECK(std::min(block_q, tail_bits.numel()) <= mk::mask::kMaxRows,
           "block_map: block_q must be at most ", mk::mask::kMaxRows,
           " where there are as many rows, got ", block_q);
  MK_CHECK(indices.size() <= mk::mask::kMaxLists && begins.size() == indices.size() &&
               kinds.size() == indices.size(),
           "block_map: indices, begins and kinds must be as many, at most ", mk::mask::kMaxLists);
  BlockMapParams p{};
  p.rows = rows_view(intervals, tail_bits, tail_base, cu_q, kv_lens);
  p.block_q = block_q;
  p.block_kv = block_kv;
  p.whole = whole;
  p.num_q_blocks = num_q_blocks;
  p.cu_q_blocks =
      mask_data<int32_t>("cu_q_blocks", cu_q_blocks, ScalarType::Int, cu_q.numel(), cu_q);
  p.ranges = mask_data<int32_t>("ranges", ranges, ScalarType::Int, 4 * num_q_blocks, cu_q);
  p.counts = mask_data<int32_t>("counts", counts, ScalarType::Int, 2 * num_q_blocks, cu_q);
  p.num_lists = static_cast<int32_t>(indices.size());
  for (size_t i = 0; i < indices.size(); ++i) {
    // Without begins, each q-block has a row of equal width.
    const int64_t size = indices[i].numel();
    const bool has_begins = begins[i].numel() > 0;
    MK_CHECK(has_begins || num_q_blocks == 0 || size % num_q_blocks == 0,
             "block_map: indices must be rows of one width a q-block, got ", size);
    p.lists[i] = {
        mask_data<int32_t>("indices", indices[i], ScalarType::Int, size, cu_q), size,
        has_begins ? mask_data<int64_t>("begins", begins[i], ScalarType::Long, num_q_blocks, cu_q)
                   : nullptr,
        num_q_blocks > 0 ? size / num_q_blocks : 0, static_cast<int32_t>(kinds[i])};
  }
#ifdef MK_WITH_CUDA
  if (cu_q.is_cuda()) {
    return mk::ops::on_cuda(cu_q, [&](void* stream) { mk::mask::launch_block_map(p, stream); });
  }
#endif
  mk::mask::fill_cu_q_blocks(p);
  torch::stable::parallel_for(0, num_q_blocks, kMinThreadBlocks, [&](int64_t begin, int64_t end) {
    mk::mask::block_map_host(p, begin, end);
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mooncake_kernels, m) {
  m.def(
      "mask_block_map(Tensor intervals, Tensor tail_bits, Tensor tail_base, Tensor cu_q, "
      "Tensor kv_lens, int block_q, int block_kv, bool whole, int num_q_blocks, "
      "Tensor(a!)? cu_q_blocks, Tensor(b!)? ranges, Tensor(c!)? counts, Tensor(d!)[] indices, "
      "Tensor[] begins, int[] kinds) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CPU, m) {
  m.impl("mask_block_map", TORCH_BOX(&mask_block_map));
}

#ifdef MK_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CUDA, m) {
  m.impl("mask_block_map", TORCH_BOX(&mask_block_map));
}
#endif
