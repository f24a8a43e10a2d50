// Bulk copies between global and shared memory (sm_90 and later), one instruction per function; see
// cp.async.bulk and mbarrier in the PTX manual. For .cu files only.
#pragma once

#include <cstdint>

namespace mk::kv {

// All sizes and addresses are multiples of 16 bytes; "global" may be pinned host memory.
struct BulkInstructions {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  static __device__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
  }

  static __device__ char* stages() {
    extern __shared__ __align__(128) char mk_bulk_stages[];
    return mk_bulk_stages;
  }

  // One arrival completes a phase, once the bytes that it has announced are there.
  static __device__ void make_barrier(uint64_t* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier))
                 : "memory");
  }

  // Makes the barriers, which ordinary stores initialized, visible to the copies.
  static __device__ void fence_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }

  static __device__ void load(char* stage, const char* src, int32_t num_bytes, uint64_t* barrier) {
    const uint32_t at = shared_address(barrier);
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(num_bytes)
                 : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(stage)),
        "l"(__cvta_generic_to_global(src)), "r"(num_bytes), "r"(at)
        : "memory");
  }

  // Waits for the phase of that parity to complete: the current phase or the one before.
  static __device__ void wait(uint64_t* barrier, uint32_t parity) {
    const uint32_t at = shared_address(barrier);
    uint32_t done = 0;
    while (!done) {
      asm volatile(
          "{\n"
          ".reg .pred complete;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n"
          "selp.b32 %0, 1, 0, complete;\n"
          "}"
          : "=r"(done)
          : "r"(at), "r"(parity)
          : "memory");
    }
  }

  // Each store is its own group, which the waits below count.
  static __device__ void store(char* dst, const char* stage, int32_t num_bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(dst)),
                 "r"(shared_address(stage)), "r"(num_bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }

  // Waits until all stores but the last kPending have read their stage.
  template <int kPending>
  static __device__ void wait_for_reads() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
  }

  // Waits until all stores are done.
  static __device__ void wait_for_writes() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
#else
  // For older GPUs, where the launcher refuses to run it.
  static __device__ char* stages() { return nullptr; }
  static __device__ void make_barrier(uint64_t*) {}
  static __device__ void fence_barriers() {}
  static __device__ void load(char*, const char*, int32_t, uint64_t*) {}
  static __device__ void wait(uint64_t*, uint32_t) {}
  static __device__ void store(char*, const char*, int32_t) {}
  template <int kPending>
  static __device__ void wait_for_reads() {}
  static __device__ void wait_for_writes() {}
#endif
};

}  // namespace mk::kv
