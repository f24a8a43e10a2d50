// Why an optional library is missing, for the doctor: the loader's own message.
#include <string>

#include "common/cuda_driver.h"
#include "host/module.h"
#include "rdma/verbs.h"

namespace py = pybind11;

namespace mk::host {
namespace {

std::string missing_cuda_driver() {
#if MK_HAVE_CUDA_H
  return CudaDriver::reason();
#else
  return "built without cuda.h";
#endif
}

std::string missing_verbs() { return rdma::Verbs::reason(); }

}  // namespace

void bind_libraries(py::module_& m) {
  m.def("missing_cuda_driver", &missing_cuda_driver,
        "Why the CUDA driver is not usable; empty if it is.");
  m.def("missing_verbs", &missing_verbs, "Why libibverbs is not usable; empty if it is.");
}

}  // namespace mk::host
