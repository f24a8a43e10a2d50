#include "host/module.h"

PYBIND11_MODULE(_host, m) {
  m.doc() =
      "Host families of mooncake_kernels: hashing, rdma, store, topology, transfer. Buffers "
      "cross as addresses.";
  mk::host::bind_errors(m);
  mk::host::bind_libraries(m);
  mk::host::bind_hash(m);
  mk::host::bind_memory(m);
  mk::host::bind_rdma(m);
  mk::host::bind_store(m);
  mk::host::bind_topology(m);
  mk::host::bind_transfer(m);
}
