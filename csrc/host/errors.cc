// Translates csrc's errors into those of mooncake_kernels/errors.py.
#include <cerrno>

#include "common/check.h"
#include "host/module.h"

namespace py = pybind11;

namespace mk::host {
namespace {

void raise(const char* type, const char* what) {
  const py::object error = py::module_::import("mooncake_kernels.errors").attr(type);
  PyErr_SetString(error.ptr(), what);
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const InvalidArgument& e) {
    raise("InvalidArgument", e.what());
  } catch (const Unavailable& e) {
    raise("Unavailable", e.what());
  } catch (const CudaError& e) {
    raise("CudaError", e.what());
  } catch (const SystemError& e) {
    const py::tuple arguments = py::make_tuple(e.code().value(), e.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

}  // namespace

void bind_errors(py::module_&) { py::register_exception_translator(translate); }

}  // namespace mk::host
