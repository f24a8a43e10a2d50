// Streams, events and copies, which are done when somebody asks for an event behind them.
#include <unistd.h>

#include <cstring>

#include "fake_cuda/fake.h"

namespace fake {

namespace {

// No thread does it, as little as where a GPU does: ThreadSanitizer would report each word of
// payload that somebody else uses at the same time, and be a minute about a MiB.
void copy(void* dst, const void* src, size_t num_bytes) {
#if defined(__x86_64__)
  asm volatile("rep movsb" : "+D"(dst), "+S"(src), "+c"(num_bytes) : : "memory");
#else
  std::memcpy(dst, src, num_bytes);
#endif
}

}  // namespace

void Stream::run() {
  while (!ops.empty() && !world().values["is_held"]) {
    const Op op = ops.front();
    switch (op.kind) {
      case Op::Kind::kGate:
      case Op::Kind::kHost:
        return;
      case Op::Kind::kCopy:
        copy(world().bytes_at(op.dst, op.num_bytes), world().bytes_at(op.src, op.num_bytes),
             op.num_bytes);
        break;
      case Op::Kind::kRecord:
        op.event->num_done = op.number;
        break;
      case Op::Kind::kWait:
        if (op.event->num_done < op.number) op.event->stream->run();
        if (op.event->num_done < op.number) return;
        break;
    }
    ops.pop_front();
  }
}

std::shared_ptr<Stream> World::stream(CUstream handle) {
  if (!handle) return legacy;
  const auto found = streams.find(handle);
  return found == streams.end() ? nullptr : found->second;
}

namespace {

std::shared_ptr<Event> event_of(CUevent handle) {
  const auto found = world().events.find(handle);
  return found == world().events.end() ? nullptr : found->second;
}

// A stream of the engine's must not be the legacy one, with which the whole GPU waits; a program's
// may be.
CUresult add_copy(CUdeviceptr dst, CUdeviceptr src, size_t num_bytes, CUstream handle) {
  const bool is_taken = handle || world().values["takes_legacy"];
  const auto stream = is_taken ? world().stream(handle) : nullptr;
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  if (!world().bytes_at(dst, num_bytes) || !world().bytes_at(src, num_bytes)) {
    return CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  stream->ops.push_back({Op::Kind::kCopy, dst, src, num_bytes, nullptr, 0});
  return CUDA_SUCCESS;
}

CUresult copy_batch(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count,
                    CUmemcpyAttributes* attributes, size_t* firsts, size_t num_attributes,
                    size_t* failed, CUstream stream) {
  FAKE_CALL("cuMemcpyBatchAsync");
  if (world().values["has_no_batch"]) return CUDA_ERROR_NOT_SUPPORTED;
  if (!stream) return CUDA_ERROR_INVALID_VALUE;
  ++world().values["num_batches"];
  if (num_attributes != 1 || firsts[0] != 0 || !attributes) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    *failed = i;
    if (const CUresult error = add_copy(dsts[i], srcs[i], sizes[i], stream)) return error;
  }
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace fake

using namespace fake;

extern "C" {

// A stream of the program's, in which a gate holds up what comes behind it.
void* fake_stream() {
  const std::lock_guard lock(world().mutex);
  initialize();
  void* const handle = new char;
  world().streams[handle] = std::make_shared<Stream>();
  return handle;
}
void fake_gate(void* stream) {
  const std::lock_guard lock(world().mutex);
  world().stream(static_cast<CUstream>(stream))->ops.push_back({Op::Kind::kGate, 0, 0, 0, {}, 0});
}
void fake_open(void* stream) {
  const std::lock_guard lock(world().mutex);
  auto& ops = world().stream(static_cast<CUstream>(stream))->ops;
  if (!ops.empty() && ops.front().kind == Op::Kind::kGate) ops.pop_front();
}
void fake_copy(void* stream, uint64_t dst, uint64_t src, uint64_t num_bytes) {
  const std::lock_guard lock(world().mutex);
  add_copy(dst, src, num_bytes, static_cast<CUstream>(stream));
}
void fake_synchronize(void* handle) {
  for (;; usleep(100)) {
    const std::lock_guard lock(world().mutex);
    const auto stream = world().stream(static_cast<CUstream>(handle));
    stream->run();
    if (stream->ops.empty()) return;
  }
}
void* fake_record(void* stream) {
  const std::lock_guard lock(world().mutex);
  const auto event = std::make_shared<Event>();
  event->stream = world().stream(static_cast<CUstream>(stream));
  event->stream->ops.push_back({Op::Kind::kRecord, 0, 0, 0, event, ++event->num_recorded});
  void* const handle = new char;
  world().events[handle] = event;
  return handle;
}

CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  FAKE_CALL("cuStreamCreate");
  if (flags != CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  *stream = reinterpret_cast<CUstream>(new char);
  world().streams[*stream] = std::make_shared<Stream>();
  return CUDA_SUCCESS;
}
CUresult cuStreamDestroy(CUstream stream) {
  const std::lock_guard lock(world().mutex);
  const auto found = world().stream(stream);
  if (!stream || !found) return CUDA_ERROR_INVALID_HANDLE;
  found->run();  // what it holds up is done some time
  world().streams.erase(stream);
  return CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream handle) {
  for (;; usleep(100)) {  // until a test has opened the gates
    FAKE_CALL("cuStreamSynchronize");
    const auto stream = world().stream(handle);
    if (!stream) return CUDA_ERROR_INVALID_HANDLE;
    stream->run();
    if (stream->ops.empty()) return CUDA_SUCCESS;
  }
}
CUresult cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned) {
  FAKE_CALL("cuStreamWaitEvent");
  const auto stream = world().stream(handle);
  const auto event = event_of(event_handle);
  if (!stream || !event) return CUDA_ERROR_INVALID_HANDLE;
  stream->ops.push_back({Op::Kind::kWait, 0, 0, 0, event, event->num_recorded});
  return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent* event, unsigned flags) {
  FAKE_CALL("cuEventCreate");
  if (flags != CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_VALUE;
  *event = reinterpret_cast<CUevent>(new char);
  world().events[*event] = std::make_shared<Event>();
  return CUDA_SUCCESS;
}
CUresult cuEventDestroy(CUevent event) {
  const std::lock_guard lock(world().mutex);
  return world().events.erase(event) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}
CUresult cuEventRecord(CUevent handle, CUstream stream_handle) {
  FAKE_CALL("cuEventRecord");
  const auto event = event_of(handle);
  const auto stream = world().stream(stream_handle);
  if (!event || !stream) return CUDA_ERROR_INVALID_HANDLE;
  event->stream = stream;
  event->num_looks = world().values["num_looks"];
  stream->ops.push_back({Op::Kind::kRecord, 0, 0, 0, event, ++event->num_recorded});
  return CUDA_SUCCESS;
}
CUresult cuEventQuery(CUevent handle) {
  FAKE_UNSAFE_CALL("cuEventQuery");
  const auto event = event_of(handle);
  if (!event) return CUDA_ERROR_INVALID_HANDLE;
  if (event->num_recorded == 0) return CUDA_SUCCESS;
  if (world().values["hangs"] || event->num_looks-- > 0) return CUDA_ERROR_NOT_READY;
  event->stream->run();
  return event->num_done == event->num_recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t num_bytes, CUstream stream) {
  FAKE_CALL("cuMemcpyAsync");
  return add_copy(dst, src, num_bytes, stream);
}

// Under the version of CUDA 13 it has no `failed`: who asks for that one, and calls it so, fails.
// The CUDA runtime, which asks for every function in this way, finds none and reports no device.
CUresult cuGetProcAddress(const char* name, void** function, int version, cuuint64_t,
                          CUdriverProcAddressQueryResult*) {
  const bool known = !std::strcmp(name, "cuMemcpyBatchAsync") && version == 12080;
  *function = known ? reinterpret_cast<void*>(&copy_batch) : nullptr;
  return known ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

}  // extern "C"
