// Translates csrc's errors into those of mooncake_kernels/errors.py.
#include <cerrno>
#include <cstring>

#include "common/check.h"
#include "host/gil.h"
#include "host/module.h"
#include "store/damage.h"

namespace py = pybind11;

namespace mk::host {
namespace {

// File paths are bytes that need not be valid text.
py::object text_of(const char* what) {
  const auto num_bytes = static_cast<Py_ssize_t>(std::strlen(what));
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeUTF8(what, num_bytes, "backslashreplace"));
}

void raise_text(const char* type, const char* what) { raise(type, py::make_tuple(text_of(what))); }

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const InvalidArgument& e) {
    raise_text("InvalidArgument", e.what());
  } catch (const store::PoolDamaged& e) {
    raise_text("PoolDamaged", e.what());
  } catch (const Unavailable& e) {
    raise_text("Unavailable", e.what());
  } catch (const CudaError& e) {
    raise_text("CudaError", e.what());
  } catch (const SystemError& e) {
    const py::tuple arguments = py::make_tuple(e.code().value(), text_of(e.what()));
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
  }
}

}  // namespace

void raise(const char* type, const py::tuple& arguments) {
  const py::object kind = py::module_::import("mooncake_kernels.errors").attr(type);
  sleeping_at_exit([&] {  // a constructor may be Python code, which gives the GIL away
    PyObject* const error = PyObject_CallObject(kind.ptr(), arguments.ptr());
    if (error == nullptr) return;  // with the error of the call
    PyErr_SetObject(kind.ptr(), error);
    Py_DECREF(error);
  });
}

void bind_errors(py::module_&) { py::register_exception_translator(translate); }

}  // namespace mk::host
