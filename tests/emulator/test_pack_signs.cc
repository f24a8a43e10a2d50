// pack_signs_kernel on the CPU, beside the host loop and the bits themselves: zeros, infinities and
// NaN, and a last warp that is not full.
#include "emulator/cuda_on_cpu.h"
// The device code is behind what stands for CUDA.
#include <cmath>
#include <vector>

#include "expect.h"
#include "similarity/pack_signs_kernel.cuh"

namespace {

using namespace mk::similarity;

void check(int64_t num_bytes, emu::Launch launch) {
  const float some[] = {0.f, -0.f, 1.f, -1.f, NAN, -NAN, INFINITY, -INFINITY, 1e-45f, -1e-45f};
  std::vector<float> values(8 * num_bytes);
  std::vector<uint8_t> want(num_bytes), on_host(num_bytes, 7), on_device(num_bytes, 9);
  for (int64_t i = 0; i < 8 * num_bytes; ++i) {
    values[i] = some[i * 2654435761u % 1009 % 10];
    want[i / 8] |= static_cast<uint8_t>((values[i] >= 0) << i % 8);
  }
  pack_signs_host({values.data(), on_host.data(), num_bytes}, 0, num_bytes / 2);
  pack_signs_host({values.data(), on_host.data(), num_bytes}, num_bytes / 2, num_bytes);
  launch.block = dim3(kPackThreads);
  emu::run(pack_signs_kernel, launch, PackSignsParams{values.data(), on_device.data(), num_bytes});
  EXPECT(on_host == want);
  EXPECT(on_device == want);
}

}  // namespace

int main() {
  for (const int64_t num_bytes : {0, 1, 3, 4, 32, 33, 100, 257}) {
    check(num_bytes, {1, 0});
    check(num_bytes, {3, 0, 5});
  }
  return failures();
}
