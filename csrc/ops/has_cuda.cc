// torch.ops.mooncake_kernels.has_cuda: whether the CUDA kernels were compiled in.
#include <torch/csrc/stable/library.h>

namespace {

bool has_cuda() {
#ifdef MK_WITH_CUDA
  return true;
#else
  return false;
#endif
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(mooncake_kernels, m) { m.def("has_cuda() -> bool"); }

STABLE_TORCH_LIBRARY_IMPL(mooncake_kernels, CompositeExplicitAutograd, m) {
  m.impl("has_cuda", TORCH_BOX(&has_cuda));
}
