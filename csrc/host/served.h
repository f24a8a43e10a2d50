// How objects of a pool are served to peers, and asked of them.
#pragma once

#include <pybind11/pybind11.h>

#include "host/transfer_requests.h"

namespace mk::host {

// ObjectService, ObjectsReply, and the calls of an engine that serve and ask.
void bind_served_objects(pybind11::module_& m, EngineClass& engine);

}  // namespace mk::host
