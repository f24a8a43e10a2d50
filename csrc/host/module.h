// The parts of mooncake_kernels._host: each binds one family into the module. No torch here.
#pragma once

#include <pybind11/pybind11.h>

namespace mk::host {

// Sets an error of mooncake_kernels/errors.py as the one that Python sees.
void raise(const char* type, const pybind11::tuple& arguments);

void bind_errors(pybind11::module_& m);
void bind_libraries(pybind11::module_& m);
void bind_hash(pybind11::module_& m);
void bind_memory(pybind11::module_& m);
void bind_rdma(pybind11::module_& m);
void bind_store(pybind11::module_& m);
void bind_topology(pybind11::module_& m);
void bind_transfer(pybind11::module_& m);

}  // namespace mk::host
