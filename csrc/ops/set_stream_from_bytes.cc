// torch.ops.mooncake_kernels.set_stream_from_bytes: the job size from which CPU stores bypass the
// cache. Measured per machine; applies to the whole process.
#include <torch/csrc/stable/library.h>

#include "common/check.h"
#include "common/run_copier.h"

namespace {

int64_t set_stream_from_bytes(int64_t num_bytes) {
  MK_CHECK(num_bytes >= 0, "set_stream_from_bytes: num_bytes must be 0 or more, got ", num_bytes);
  return mk::set_stream_from_bytes(num_bytes);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mooncake_kernels, m) {
  m.def("set_stream_from_bytes(int num_bytes) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CompositeExplicitAutograd, m) {
  m.impl("set_stream_from_bytes", TORCH_BOX(&set_stream_from_bytes));
}
