// CUDA device code on the CPU: a CUDA thread is a fiber that runs until it meets a barrier.
//
//   emu::run(my_kernel<uint4>, {.grid = 4, .block = 256}, params, ptr);
//
// Enough for kernels of plain C++: threadIdx and friends, static shared memory, __syncthreads, warp
// shuffles and votes, atomics. Not for inline PTX, cp.async, TMA or mma: keep those in a thin
// inline function with a plain twin. Blocks run one after another. A seed shuffles the order in
// which the threads of a block run between barriers, so that a missing barrier shows; barriers that
// not every thread reaches abort. Compile with g++ -fsanitize=address,undefined to see bad
// accesses.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __restrict__ __restrict
#define __shared__ static  // blocks run one at a time, so one copy is the block's own

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

namespace emu {

struct Launch {
  dim3 grid, block;
  unsigned seed = 0;  // 0: threads in their order; otherwise shuffled
};

enum class State { kRunnable, kAtWarpBarrier, kAtBlockBarrier, kDone };

constexpr unsigned kWarp = 32;
constexpr size_t kStackBytes = 64 << 10;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  State state = State::kDone;
  dim3 index;
  unsigned rank = 0;  // in its block
};

// The one block that is running.
struct Block {
  dim3 grid, size, index;
  std::vector<Fiber> fibers;
  std::vector<uint64_t> exchanged;  // what each thread brings to a warp operation
  ucontext_t scheduler;
  Fiber* current = nullptr;
  std::function<void()> body;
};
inline Block* g_block = nullptr;

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "cuda_on_cpu: %s\n", what);
  std::abort();
}

inline void wait_at(State barrier) {
  Fiber* self = g_block->current;
  self->state = barrier;
  swapcontext(&self->context, &g_block->scheduler);
}

inline void fiber_main() {
  g_block->body();
  g_block->current->state = State::kDone;
}

inline void start(Block& block, unsigned rank) {
  Fiber& fiber = block.fibers[rank];
  fiber.state = State::kRunnable;
  fiber.rank = rank;
  fiber.index = dim3(rank % block.size.x, rank / block.size.x % block.size.y,
                     rank / (block.size.x * block.size.y));
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack.get();
  fiber.context.uc_stack.ss_size = kStackBytes;
  fiber.context.uc_link = &block.scheduler;
  makecontext(&fiber.context, fiber_main, 0);
}

inline unsigned count(const Block& block, unsigned begin, unsigned end, State state) {
  return std::count_if(block.fibers.begin() + begin, block.fibers.begin() + end,
                       [state](const Fiber& fiber) { return fiber.state == state; });
}

inline void release(Block& block, unsigned begin, unsigned end, State barrier) {
  for (unsigned i = begin; i < end; ++i) {
    if (block.fibers[i].state == barrier) block.fibers[i].state = State::kRunnable;
  }
}

// Lets go of every warp whose live threads have all reached a warp operation.
inline bool release_warps(Block& block) {
  const unsigned size = block.fibers.size();
  bool released = false;
  for (unsigned begin = 0; begin < size; begin += kWarp) {
    const unsigned end = std::min(begin + kWarp, size);
    const unsigned waiting = count(block, begin, end, State::kAtWarpBarrier);
    if (waiting && waiting + count(block, begin, end, State::kDone) == end - begin) {
      release(block, begin, end, State::kAtWarpBarrier);
      released = true;
    }
  }
  return released;
}

inline void run_block(Block& block, std::mt19937* shuffle) {
  const unsigned size = block.fibers.size();
  std::vector<unsigned> order(size);
  for (unsigned rank = 0; rank < size; ++rank) start(block, order[rank] = rank);
  while (count(block, 0, size, State::kDone) != size) {
    if (shuffle) std::shuffle(order.begin(), order.end(), *shuffle);
    for (const unsigned rank : order) {
      if (block.fibers[rank].state != State::kRunnable) continue;
      block.current = &block.fibers[rank];
      swapcontext(&block.scheduler, &block.current->context);
    }
    if (release_warps(block)) continue;
    const unsigned waiting = count(block, 0, size, State::kAtBlockBarrier);
    if (waiting == size) {
      release(block, 0, size, State::kAtBlockBarrier);
    } else if (waiting) {
      fail("__syncthreads is not reached by every thread of the block");
    }
  }
}

template <class Kernel, class... Arguments>
void run(Kernel kernel, const Launch& launch, Arguments... arguments) {
  Block block;
  block.grid = launch.grid;
  block.size = launch.block;
  block.fibers = std::vector<Fiber>(launch.block.x * launch.block.y * launch.block.z);
  block.exchanged.resize(block.fibers.size() + kWarp);
  block.body = [&] { kernel(arguments...); };
  std::mt19937 shuffle(launch.seed);
  g_block = &block;
  for (unsigned z = 0; z < launch.grid.z; ++z) {
    for (unsigned y = 0; y < launch.grid.y; ++y) {
      for (unsigned x = 0; x < launch.grid.x; ++x) {
        block.index = dim3(x, y, z);
        run_block(block, launch.seed ? &shuffle : nullptr);
      }
    }
  }
  g_block = nullptr;
}

inline unsigned lane() { return g_block->current->rank % kWarp; }

// Every live lane brings a value and takes that of another lane of its warp.
template <class T>
T exchange(T value, unsigned from_lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  const unsigned rank = g_block->current->rank;
  std::memcpy(&g_block->exchanged[rank], &value, sizeof(T));
  wait_at(State::kAtWarpBarrier);
  T result;
  const unsigned from = from_lane < kWarp ? rank - rank % kWarp + from_lane : rank;
  std::memcpy(&result, &g_block->exchanged[from], sizeof(T));
  wait_at(State::kAtWarpBarrier);  // no one writes the next value before all have read this one
  return result;
}

}  // namespace emu

#define threadIdx (emu::g_block->current->index)
#define blockIdx (emu::g_block->index)
#define blockDim (emu::g_block->size)
#define gridDim (emu::g_block->grid)

inline void __syncthreads() { emu::wait_at(emu::State::kAtBlockBarrier); }
inline void __syncwarp(unsigned = ~0u) { emu::wait_at(emu::State::kAtWarpBarrier); }
template <class T>
T __shfl_sync(unsigned, T value, int from) {
  return emu::exchange(value, from % emu::kWarp);
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emu::exchange(value, emu::lane() ^ mask);
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned delta) {
  return emu::exchange(value, emu::lane() + delta);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  unsigned bits = 0;
  for (unsigned i = 0; i < emu::kWarp; ++i)
    bits |= (emu::exchange(predicate != 0, i) ? 1u : 0u) << i;
  return bits;
}
inline void __threadfence_system() {}
template <class T>
T atomicAdd(T* address, T value) {
  const T old = *address;
  *address = old + value;
  return old;
}
template <class T>
T atomicMin(T* address, T value) {
  const T old = *address;
  *address = std::min(old, value);
  return old;
}
template <class T>
T atomicCAS(T* address, T expected, T value) {
  const T old = *address;
  if (old == expected) *address = value;
  return old;
}
