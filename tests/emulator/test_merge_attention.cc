// merge_attention_kernel on the CPU, beside the host loop: types, odd dims, parts without keys.
#include "emulator/cuda_on_cpu.h"
// The device code is behind what stands for CUDA.
#include <vector>

#include "attention/merge_attention_kernel.cuh"
#include "expect.h"

namespace {

using namespace mk;
using namespace mk::attention;

template <class E>
void check(int64_t num_parts, int64_t num_rows, int64_t dim, bool is_log2, emu::Launch launch) {
  using Code = typename E::Code;
  std::vector<Code> outs(num_parts * num_rows * dim);
  std::vector<float> lses(num_parts * num_rows);
  for (size_t i = 0; i < outs.size(); ++i) {
    outs[i] = E::from_float(static_cast<float>(i * 2654435761u >> 20 & 0xff) / 64 - 2);
  }
  for (size_t i = 0; i < lses.size(); ++i) {
    lses[i] = i % 3 == 1 || i % num_rows == 2 ? -INFINITY : static_cast<float>(i % 7) - 3;
    if (lses[i] != -INFINITY) continue;
    for (int64_t d = 0; d < dim; ++d) outs[i * dim + d] = E::from_float(NAN);
  }
  std::vector<Code> on_host(num_rows * dim, 1), on_device(num_rows * dim, 2);
  std::vector<float> host_lse(num_rows, 1), device_lse(num_rows, 2);
  MergeAttentionParams p{reinterpret_cast<const char*>(outs.data()),
                         lses.data(),
                         reinterpret_cast<char*>(on_host.data()),
                         host_lse.data(),
                         num_parts,
                         num_rows,
                         dim,
                         E::kType,
                         is_log2};
  merge_attention_host(p, 0, num_rows / 2);
  merge_attention_host(p, num_rows / 2, num_rows);
  p.out = reinterpret_cast<char*>(on_device.data());
  p.lse = device_lse.data();
  launch.block = dim3(kMergeThreads);
  with_merge_kernel(p, [&](auto kernel) { emu::run(kernel, launch, p); });
  EXPECT(on_host == on_device);
  EXPECT(host_lse == device_lse);
  EXPECT(num_rows < 3 || host_lse[2] == -INFINITY);
}

}  // namespace

int main() {
  for (const int64_t dim : {1, 7, 8, 64, 136, 512}) {
    for (const bool is_log2 : {false, true}) {
      check<Element<ElementType::kFloat32>>(3, 5, dim, is_log2, {2, 0});
      check<Element<ElementType::kBFloat16>>(2, 9, dim, is_log2, {1, 0, 7});
      check<Element<ElementType::kFloat16>>(1, 4, dim, is_log2, {3, 0});
    }
  }
  check<Element<ElementType::kFloat32>>(2, 0, 8, false, {1, 0});
  return failures();
}
