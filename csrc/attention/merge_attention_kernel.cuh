// The device code of merge_attention: nvcc compiles it for the GPU, tests/emulator for the CPU.
#pragma once

#include "attention/merge_attention.h"

namespace mk::attention {

constexpr int kMergeThreads = 128;
constexpr int kMergeWarp = 32;

// kCount neighbouring elements, moved by one load or store.
template <class E, int kCount>
struct alignas(sizeof(typename E::Code) * kCount) ElementRun {
  typename E::Code codes[kCount];
};

// One warp per row; each lane handles kCount elements at a time. kCount divides dim, and the
// addresses are multiples of a run.
template <class E, int kCount>
__global__ void __launch_bounds__(kMergeThreads)
    merge_attention_kernel(const __grid_constant__ MergeAttentionParams p) {
  using Run = ElementRun<E, kCount>;
  const auto* const outs = reinterpret_cast<const Run*>(p.outs);
  auto* const out = reinterpret_cast<Run*>(p.out);
  const int64_t warps = int64_t{gridDim.x} * (kMergeThreads / kMergeWarp);
  const int64_t warp = (int64_t{blockIdx.x} * kMergeThreads + threadIdx.x) / kMergeWarp;
  const int lane = threadIdx.x % kMergeWarp;
  for (int64_t row = warp; row < p.num_rows; row += warps) {
    const MergeAttentionParams::Merged merged = p.merged(row);
    if (lane == 0) p.lse[row] = p.merged_lse(merged);
    for (int64_t run = lane; run < p.dim / kCount; run += kMergeWarp) {
      float sums[kCount] = {};
      for (int64_t part = 0; part < p.num_parts; ++part) {
        const float weight = p.weight(part, row, merged);
        if (weight == 0) continue;
        const Run values = outs[p.first(part, row) / kCount + run];
        for (int i = 0; i < kCount; ++i) sums[i] += weight * E::to_float(values.codes[i]);
      }
      Run result;
      for (int i = 0; i < kCount; ++i) result.codes[i] = E::from_float(sums[i]);
      out[row * p.dim / kCount + run] = result;
    }
  }
}

// Calls run(kernel) with the kernel for the widest runs that fit.
template <class E, class Run>
void with_merge_kernel_of(const MergeAttentionParams& p, const Run& run) {
  constexpr int kWidest = 16 / sizeof(typename E::Code);
  const auto bits = reinterpret_cast<uintptr_t>(p.outs) | reinterpret_cast<uintptr_t>(p.out);
  const bool is_wide = p.dim % kWidest == 0 && bits % 16 == 0;
  is_wide ? run(merge_attention_kernel<E, kWidest>) : run(merge_attention_kernel<E, 1>);
}

template <class Run>
void with_merge_kernel(const MergeAttentionParams& p, const Run& run) {
  switch (p.type) {
    case ElementType::kFloat16:
      return with_merge_kernel_of<Element<ElementType::kFloat16>>(p, run);
    case ElementType::kBFloat16:
      return with_merge_kernel_of<Element<ElementType::kBFloat16>>(p, run);
    default:  // results are never fp8
      return with_merge_kernel_of<Element<ElementType::kFloat32>>(p, run);
  }
}

}  // namespace mk::attention
