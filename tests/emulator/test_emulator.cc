// The emulator itself: shuffles and barriers work, and a missing or a diverging barrier shows.
#include "emulator/cuda_on_cpu.h"
#include "expect.h"

namespace {

constexpr int kThreads = 128;

// out[b] = sum of row b of x; without its barrier where kBarrier is false.
template <bool kBarrier>
__global__ void row_sum(const int* x, int* out, int num_columns) {
  __shared__ int partial[kThreads / 32];
  int sum = 0;
  for (int c = threadIdx.x; c < num_columns; c += kThreads) sum += x[blockIdx.x * num_columns + c];
  for (int mask = 16; mask; mask >>= 1) sum += __shfl_xor_sync(~0u, sum, mask);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  if (kBarrier) __syncthreads();
  if (threadIdx.x == 0) {
    out[blockIdx.x] = 0;
    for (int part : partial) out[blockIdx.x] += part;
  }
}

__global__ void ballot(unsigned* out) {
  const unsigned odd = __ballot_sync(~0u, threadIdx.x % 2);
  if (threadIdx.x == 0) *out = odd;
}

__global__ void diverging_barrier() {
  if (threadIdx.x < 7) __syncthreads();
}

}  // namespace

int main(int argc, char**) {
  if (argc > 1) emu::run(diverging_barrier, {1, 32});  // aborts: the test expects it

  const int num_rows = 5, num_columns = 300;
  std::vector<int> x(num_rows * num_columns), want(num_rows), sums(num_rows);
  for (int r = 0; r < num_rows; ++r) {
    for (int c = 0; c < num_columns; ++c) want[r] += x[r * num_columns + c] = (r * 31 + c * 7) % 11;
  }
  bool missing_barrier_shows = false;
  for (unsigned seed = 0; seed < 8; ++seed) {
    emu::run(row_sum<true>, {num_rows, kThreads, seed}, x.data(), sums.data(), num_columns);
    EXPECT(sums == want);
    emu::run(row_sum<false>, {num_rows, kThreads, seed}, x.data(), sums.data(), num_columns);
    missing_barrier_shows |= sums != want;
  }
  EXPECT(missing_barrier_shows);

  unsigned odd = 0;
  emu::run(ballot, {1, 32}, &odd);
  EXPECT(odd == 0xaaaaaaaau);
  return failures();
}
