// Conversion of a caller's requests to the engine from Python.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "transfer/engine/engine.h"

namespace mk::host {

using EngineClass = pybind11::class_<transfer::Engine, std::shared_ptr<transfer::Engine>>;

void bind_requests(pybind11::module_& m, EngineClass& engine);

}  // namespace mk::host
