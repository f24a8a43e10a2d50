// Memory that a CPU and a GPU share while either writes it: loads, stores, clock and pause of each.
// Device code uses PTX, other code a plain equivalent, so that what is built on it runs without a
// GPU.
//
// Layer: kv.
#pragma once

#include <cstdint>

#include "common/hd.h"

namespace mk::kv {

// For the CPU: CLOCK_MONOTONIC, and a pause that depends on how long the caller has waited.
int64_t host_now_ns();
void host_pause(int64_t waited_ns);

// Writes before the store that this load sees, by any thread, are visible after it. `.sys`: the
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

// A plain store rather than an atomic maximum, which a GPU lacks for host memory over PCIe.
MK_HD void store_release(int64_t* address, int64_t value) {
#ifdef __CUDA_ARCH__
  asm volatile("st.release.sys.b64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
#else
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
#endif
}

// Replaces 0 by `value`; false if another thread was first. Atomic among CPU threads, or among the
// threads of one GPU.
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
  // A poll across PCIe takes a microsecond anyway; sleeping keeps a long wait off the bus.
  __nanosleep(waited_ns < 16000 ? 64 : 1000);
#else
  host_pause(waited_ns);
#endif
}

}  // namespace mk::kv
