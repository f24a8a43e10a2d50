// Memory that a CPU and a GPU both look at while the other writes: how each loads and stores, tells
// the time and passes it. In device code that is PTX, elsewhere the plain twin, so that what is
// built on it runs on a machine without a GPU.
#pragma once

#include <cstdint>

#include "common/hd.h"

namespace mk::kv {

// Of the CPU: CLOCK_MONOTONIC, and a pause for one who has waited that long.
int64_t host_now_ns();
void host_pause(int64_t waited_ns);

// What was written before the store that this load sees, by whomever, is seen after it. `.sys`: the
// other side may be the CPU, another GPU or a NIC.
MK_HD int64_t load_acquire(const int64_t* address) {
#ifdef __CUDA_ARCH__
  int64_t value;
  asm volatile("ld.acquire.sys.b64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
  return value;
#else
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
#endif
}

// A store alone, not an atomic maximum: over PCIe a GPU has no such operation on host memory.
MK_HD void store_release(int64_t* address, int64_t value) {
#ifdef __CUDA_ARCH__
  asm volatile("st.release.sys.b64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
#else
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
#endif
}

// Puts `value` where 0 is; false if somebody else was first. Atomic among the threads of the CPU,
// or those of one GPU.
MK_HD bool claim(int64_t* address, int64_t value) {
#ifdef __CUDA_ARCH__
  return atomicCAS(reinterpret_cast<unsigned long long*>(address), 0ull,
                   static_cast<unsigned long long>(value)) == 0ull;
#else
  int64_t expected = 0;
  return __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_RELAXED);
#endif
}

MK_HD int64_t now_ns() {
#ifdef __CUDA_ARCH__
  int64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
#else
  return host_now_ns();
#endif
}

MK_HD void pause(int64_t waited_ns) {
#ifdef __CUDA_ARCH__
  // A look across PCIe takes a microsecond anyway; the naps keep a long wait off the bus.
  __nanosleep(waited_ns < 16000 ? 64 : 1000);
#else
  host_pause(waited_ns);
#endif
}

}  // namespace mk::kv
