// Binds queries for the location of an address.
#include "common/memory_kind.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "host/module.h"

namespace py = pybind11;

namespace mk::host {
namespace {

// (GPU, start of its allocation, end)
std::optional<std::tuple<int, uint64_t, uint64_t>> gpu_allocation_at(uint64_t address) {
  const MemoryRange range = MemoryMap().find(address);
  if (range.kind != MemoryKind::kDevice) return std::nullopt;
  return std::make_tuple(range.device, range.begin, range.end);
}

// The address of an object with Python's buffer protocol; it need not be writable.
uint64_t address_of_bytes(const py::object& owner) {
  Py_buffer view;
  if (PyObject_GetBuffer(owner.ptr(), &view, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  const auto address = reinterpret_cast<uint64_t>(view.buf);
  PyBuffer_Release(&view);
  return address;
}

}  // namespace

void bind_memory(py::module_& m) {
  m.def("gpu_allocation_at", &gpu_allocation_at,
        "The GPU that an address is of, and its allocation; None if it is of none.",
        py::arg("address"));
  m.def("address_of_bytes", &address_of_bytes, "Where packed bytes begin.", py::arg("owner"));
}

}  // namespace mk::host
