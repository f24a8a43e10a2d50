#include "host/transfer_stats.h"

#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "host/gil.h"

namespace py = pybind11;

namespace mk::host {
namespace {

using namespace mk::transfer;

py::dict to_dict(const RequestCounters& c) {
  py::dict d;
  d["num_bytes_read"] = c.num_bytes_read.get();
  d["num_bytes_written"] = c.num_bytes_written.get();
  d["num_errors"] = c.num_errors.get();
  d["num_in_flight"] = c.num_in_flight.get();
  d["num_bytes_in_flight"] = c.num_bytes_in_flight.get();
  return d;
}

py::dict to_dict(const PathCounters& c) {
  py::dict d;
  d["num_bytes_read"] = c.num_bytes_read.get();
  d["num_bytes_written"] = c.num_bytes_written.get();
  d["num_pieces"] = c.num_pieces.get();
  d["num_retries"] = c.num_retries.get();
  d["num_reconnects"] = c.num_reconnects.get();
  d["num_failures"] = c.num_failures.get();
  return d;
}

}  // namespace

py::list stats(const Engine& engine) {
  py::list rows;
  for (const Stats::Row& row : engine.stats()) {
    const RequestCounters& requests = row.counters->requests;
    py::list latency;
    for (const Counter& bucket : requests.latency) latency.append(bucket.get());
    py::dict paths;
    for (const auto& [name, counters] : row.counters->paths()) {
      paths[py::str(name)] = to_dict(*counters);
    }
    rows.append(py::make_tuple(row.peer, transport_name(row.transport), to_dict(requests), latency,
                               requests.total_ns.get(), paths));
  }
  return rows;
}

py::tuple explain_path(const Engine& engine, const Peer& peer, uint64_t local, uint64_t remote,
                       uint64_t num_bytes, double deadline_s) {
  Explanation found;
  {
    const GilReleased released;
    found = engine.explain_path(peer, {local, num_bytes}, {remote, num_bytes}, deadline_s);
  }
  return py::make_tuple(found.path.means, found.path.remote, found.path.paths, found.reasons,
                        found.write_refusal, found.read_refusal);
}

py::list list_regions(const Engine& engine, const Peer& peer, double deadline_s) {
  std::vector<RegionTable::Listed> listed;
  {
    const GilReleased released;
    listed = engine.list_regions(peer, deadline_s);
  }
  py::list rows;
  for (const auto& [range, rights, device] : listed) {
    rows.append(py::make_tuple(range.address, range.num_bytes, (rights & kRemoteRead) != 0,
                               (rights & kRemoteWrite) != 0, device));
  }
  return rows;
}

}  // namespace mk::host
