// What the transfer engine reports about itself and its peers, for Python.
#pragma once

#include <pybind11/pybind11.h>

#include "transfer/engine/engine.h"

namespace mk::host {

const char* transport_name(transfer::Transport transport);

// Rows of (peer, transport, requests, latency, total_ns, paths): counters by name, the counts of
// the latency buckets, and each path's counters by its name.
pybind11::list stats(const transfer::Engine& engine);

// (means, remote, lanes, reasons, write_refusal, read_refusal).
pybind11::tuple explain_path(const transfer::Engine& engine, const transfer::Peer& peer,
                             uint64_t local, uint64_t remote, uint64_t num_bytes,
                             double deadline_s);

// Rows of (address, num_bytes, readable, writable, device).
pybind11::list list_regions(const transfer::Engine& engine, const transfer::Peer& peer,
                            double deadline_s);

}  // namespace mk::host
