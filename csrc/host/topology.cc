#include <pybind11/stl.h>

#include "host/module.h"
#include "topology/nic_balancer.h"

namespace py = pybind11;

namespace mk::host {

void bind_topology(py::module_& m) {
  using topology::NicBalancer;
  py::class_<NicBalancer>(m, "NicBalancer", "See csrc/topology/nic_balancer.h.")
      .def(py::init<const std::vector<double>&, std::vector<NicBalancer::Tiers>>(),
           py::arg("gb_per_s"), py::arg("tiers_by_location"))
      .def("pick", &NicBalancer::pick, py::arg("location"), py::arg("num_bytes"))
      .def("done", &NicBalancer::done, py::arg("nic"), py::arg("num_bytes"))
      .def("set_alive", &NicBalancer::set_alive, py::arg("nic"), py::arg("alive"))
      .def("in_flight", &NicBalancer::in_flight, py::arg("nic"));
}

}  // namespace mk::host
