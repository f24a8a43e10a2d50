// call_in_stream: has a CUDA stream call a function of the host once it has done what is before it,
// and wait until that has returned.
//
//   call_in_stream(reinterpret_cast<uint64_t>(stream), [](void* data) { ... }, data);
//
// Layer: transfer. The function is called by a thread of the driver's, which may call those of all
// streams in turn. It must not call the driver, nor wait for GPU work that is not before it in its
// stream: work in other streams may be behind it in a queue of the GPU. If the context fails, it is
// never called.
#pragma once

#include <cstdint>

namespace mk::transfer {

// Handles of the legacy (0, 1) and the per-thread (2) default stream are those of the calling
// thread's current context. Throws Unavailable (no driver, no context, a stream that is being
// captured into a graph, which would call it again and again), CudaError: it will not be called.
void call_in_stream(uint64_t stream, void (*function)(void*), void* data);

}  // namespace mk::transfer
