#include "host/module.h"

#include "hash/block_hashes.h"

namespace py = pybind11;

namespace mk::host {
namespace {

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void block_hashes(uintptr_t tokens, uintptr_t cu_seqlens, uintptr_t first_block, uintptr_t parents,
                  uintptr_t has_parent, int64_t num_requests, int64_t block_size, uint64_t seed,
                  uintptr_t keys, int num_threads) {
  const hash::BlockHashesParams params{
      pointer<const uint32_t>(tokens),
      pointer<const int64_t>(cu_seqlens),
      pointer<const int64_t>(first_block),
      pointer<const uint64_t>(parents),
      pointer<const uint8_t>(has_parent),
      num_requests,
      block_size,
      seed,
      pointer<uint64_t>(keys),
  };
  const py::gil_scoped_release release;
  hash::block_hashes(params, num_threads);
}

}  // namespace

void bind_hash(py::module_& m) {
  m.def("block_hashes", &block_hashes, "See csrc/hash/block_hashes.h; addresses are not checked.",
        py::arg("tokens"), py::arg("cu_seqlens"), py::arg("first_block"), py::arg("parents"),
        py::arg("has_parent"), py::arg("num_requests"), py::arg("block_size"), py::arg("seed"),
        py::arg("keys"), py::arg("num_threads"));
}

}  // namespace mk::host
