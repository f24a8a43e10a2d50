// Host functions, one at a time, each in a thread of the driver's once its stream has come to it.
// Until it has returned the work of all other streams waits as well, as if they shared a queue of
// the GPU with its stream, which CUDA allows: a function that waits for any of it hangs.
#include <unistd.h>

#include <thread>

#include "fake_cuda/fake.h"

namespace fake {
namespace {

thread_local bool is_in_host_function = false;

void call_when_reached(const std::shared_ptr<Stream>& stream, uint64_t number, CUhostFn function,
                       void* data) {
  for (;; usleep(100)) {
    const std::lock_guard lock(world().mutex);
    stream->run();
    if (world().values["is_held"] || stream->ops.empty()) continue;
    const Op& op = stream->ops.front();
    if (op.kind != Op::Kind::kHost || op.number != number) continue;
    world().values["is_held"] = 1;
    break;
  }
  is_in_host_function = true;
  function(data);
  const std::lock_guard lock(world().mutex);
  world().values["is_held"] = 0;
  stream->ops.pop_front();
}

}  // namespace

bool in_host_function() { return is_in_host_function; }

}  // namespace fake

using namespace fake;

extern "C" {

CUresult cuStreamGetCtx(CUstream handle, CUcontext* context) {
  FAKE_CALL_BEFORE_CONTEXT();
  static int of_streams;
  if (!world().stream(handle)) return CUDA_ERROR_INVALID_HANDLE;
  return *context = reinterpret_cast<CUcontext>(&of_streams), CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
  FAKE_CALL("cuStreamIsCapturing");
  if (!world().stream(handle)) return CUDA_ERROR_INVALID_HANDLE;
  *status = world().values["is_capturing"] ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                           : CU_STREAM_CAPTURE_STATUS_NONE;
  return CUDA_SUCCESS;
}
CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void* data) {
  FAKE_CALL("cuLaunchHostFunc");
  const auto stream = world().stream(handle);
  if (!stream) return CUDA_ERROR_INVALID_HANDLE;
  const auto number = static_cast<uint64_t>(++world().values["num_host_functions"]);
  stream->ops.push_back({Op::Kind::kHost, 0, 0, 0, nullptr, number});
  std::thread(call_when_reached, stream, number, function, data).detach();
  return CUDA_SUCCESS;
}

}  // extern "C"
