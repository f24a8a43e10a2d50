// torch.ops.mooncake_kernels.copy_batch: the torch binding of csrc/kv/copy_batch.h and
// csrc/kv/copy_engine.h. It returns which engine ran. Not for compiled code: its inputs and outputs
// are hidden behind addresses.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "common/check.h"
#include "kv/copy_batch.h"
#include "kv/copy_engine.h"
#include "kv/copy_list.h"
#include "ops/copy_planes.h"
#include "ops/cuda_stream.h"

namespace {

using mk::MemoryMap;
using mk::kv::CopyList;
using mk::kv::CopyRange;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Numbers as in mooncake_kernels/kv/batch.py. kCheck copies nothing: it is for an engine on the
// host that trusts its arguments.
enum Engine : int64_t { kAuto, kHost, kCuda, kCopyEngine, kCheck };

const int64_t* values_of(const char* name, const Tensor& tensor, int64_t n) {
  MK_CHECK(tensor.is_cpu() && tensor.scalar_type() == ScalarType::Long && tensor.dim() == 1 &&
               tensor.is_contiguous(),
           "copy_batch: ", name, " must be a packed 1-d int64 tensor on the CPU");
  MK_CHECK(tensor.numel() == n, "copy_batch: ", name, " must have as many values as src_ptrs (", n,
           "), got ", tensor.numel());
  return static_cast<const int64_t*>(tensor.data_ptr());
}

void check_reach(Engine engine, const CopyList& list) {
  if (engine == kHost || engine == kCheck) {
    MK_CHECK(!list.device.exists(), "copy_batch: ", name_of(list.device),
             " must be in host memory, got ", mk::kv::hex(list.device.address),
             " on cuda:", list.device_index);
  } else {
    MK_CHECK(!list.pageable.exists(), "copy_batch: ", name_of(list.pageable),
             " must be in a GPU's memory or pinned, got ", mk::kv::hex(list.pageable.address),
             " in pageable memory");
  }
}

void copy_on_host(const CopyList& list) {
  std::vector<int64_t> ends(list.ranges.size());
  int64_t end = 0;
  for (size_t i = 0; i < ends.size(); ++i) ends[i] = end += list.ranges[i].num_bytes;
  const auto n = static_cast<int64_t>(ends.size());
  // Split by bytes: a thread may begin and end within a range.
  torch::stable::parallel_for(0, end, mk::ops::kMinThreadBytes, [&](int64_t first, int64_t last) {
    mk::kv::copy_batch_host(list.ranges.data(), ends.data(), n, first, last);
  });
}

#ifdef MK_WITH_CUDA
void copy_on_cuda(const CopyList& list, Engine engine, bool any_order, int64_t max_sms) {
  const int32_t device = list.device.exists() ? list.device_index
                                              : torch::stable::accelerator::getCurrentDeviceIndex();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* const stream = mk::ops::current_cuda_stream(device);
  const auto n = static_cast<int64_t>(list.ranges.size());
  if (engine == kCopyEngine) {
    mk::kv::copy_by_engine(list.ranges.data(), n, any_order, stream);
  } else {
    mk::kv::launch_copy_batch(list.ranges.data(), n, static_cast<int>(max_sms), stream);
  }
}
#else
void copy_on_cuda(const CopyList&, Engine, bool, int64_t) {
  throw mk::Unavailable("engine cuda: _ops.so was built without nvcc, so it has no CUDA kernels");
}
#endif

int64_t copy_batch(Tensor src_ptrs, Tensor dst_ptrs, Tensor sizes, bool is_src_access_order_any,
                   int64_t engine_number, int64_t max_sms) {
  MK_CHECK(kAuto <= engine_number && engine_number <= kCheck,
           "copy_batch: engine must be in [0, 4], got ", engine_number);
  auto engine = static_cast<Engine>(engine_number);
  const int64_t n = src_ptrs.numel();
  const mk::kv::CopyArrays arrays{values_of("src_ptrs", src_ptrs, n),
                                  values_of("dst_ptrs", dst_ptrs, n), values_of("sizes", sizes, n)};
  CopyList list;
  {
    MemoryMap map;
    list = read_copy_list(arrays, n, map);
    if (engine == kAuto) engine = list.device.exists() ? kCuda : kHost;
    check_reach(engine, list);
    if (engine == kCuda) translate_for_device(list.ranges, map);
  }
  if (engine == kHost) copy_on_host(list);
  if ((engine == kCuda || engine == kCopyEngine) && !list.ranges.empty()) {
    copy_on_cuda(list, engine, is_src_access_order_any, max_sms);
  }
  return engine;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mooncake_kernels, m) {
  m.def(
      "copy_batch(Tensor src_ptrs, Tensor dst_ptrs, Tensor sizes, bool is_src_access_order_any, "
      "int engine, int max_sms) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CPU, m) {
  m.impl("copy_batch", TORCH_BOX(&copy_batch));
}
