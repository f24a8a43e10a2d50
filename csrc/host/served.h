// Bindings to serve objects of a pool to peers, and to request them.
#pragma once

#include <pybind11/pybind11.h>

#include "host/transfer_requests.h"

namespace mk::host {

// ObjectService, ObjectsResponse, and the calls of an engine that serve and ask.
void bind_served_objects(pybind11::module_& m, EngineClass& engine);

}  // namespace mk::host
