#include "ops/cuda_stream.h"

#include <dlfcn.h>
#include <torch/csrc/stable/library.h>

#include "common/check.h"

namespace mk::ops {
namespace {

using StreamGetter = AOTITorchError (*)(int32_t device_index, void** stream);

// The getter lives in libtorch_cuda.so, which a CPU-only torch does not have: linking to it would
// keep this library from loading there. A torch with CUDA has it loaded already, hence NOLOAD.
StreamGetter find_stream_getter() {
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  void* symbol = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
  return reinterpret_cast<StreamGetter>(symbol);
}

}  // namespace

void* current_cuda_stream(int32_t device_index) {
  static const StreamGetter get_stream = find_stream_getter();
  if (!get_stream) throw Unavailable("this torch was built without CUDA");
  void* stream = nullptr;
  if (get_stream(device_index, &stream) != 0) throw CudaError("CUDA: torch gave no current stream");
  return stream;
}

}  // namespace mk::ops
