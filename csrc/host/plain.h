// Arguments as most callers write them, read by Python's C functions: pybind11's conversions take
// as long as moving some KiB. Nothing is returned for anything else, which is converted, or
// refused, elsewhere.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cmath>
#include <cstdint>
#include <optional>

namespace mk::host {

inline std::optional<uint64_t> plain_unsigned(pybind11::handle object) {
  if (!PyLong_CheckExact(object.ptr())) return {};
  const uint64_t value = PyLong_AsUnsignedLongLong(object.ptr());
  if (value != UINT64_MAX || !PyErr_Occurred()) return value;
  PyErr_Clear();
  return {};
}

inline std::optional<bool> plain_bool(pybind11::handle object) {
  if (object.ptr() == Py_True) return true;
  if (object.ptr() == Py_False) return false;
  return {};
}

// From now.
inline std::optional<double> plain_deadline(pybind11::handle object) {
  constexpr double kMinDeadlineS = 1e-6;
  if (!PyFloat_CheckExact(object.ptr())) return {};
  const double deadline_s = PyFloat_AS_DOUBLE(object.ptr());
  if (!(deadline_s >= kMinDeadlineS && std::isfinite(deadline_s))) return {};
  return deadline_s;
}

// Not a subclass, which could be anything.
inline std::optional<pybind11::array> plain_array(pybind11::handle object) {
  if (Py_TYPE(object.ptr()) != pybind11::detail::npy_api::get().PyArray_Type_) return {};
  return pybind11::reinterpret_borrow<pybind11::array>(object);
}

}  // namespace mk::host
