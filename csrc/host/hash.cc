#include "hash/block_hashes.h"

#include <pybind11/numpy.h>

#include "host/module.h"

namespace py = pybind11;

namespace mk::host {
namespace {

template <class T>
const T* pointer(uintptr_t address) {
  return reinterpret_cast<const T*>(address);
}

py::array_t<uint64_t> block_hashes(uintptr_t tokens, int64_t num_tokens, uintptr_t cu_seqlens,
                                   uintptr_t parents, uintptr_t has_parent, int64_t num_requests,
                                   int64_t block_size, uint64_t seed, int num_threads) {
  const int64_t one_request[] = {0, num_tokens};
  const hash::BlockHashesParams params{
      pointer<uint32_t>(tokens),
      cu_seqlens ? pointer<int64_t>(cu_seqlens) : one_request,
      pointer<uint64_t>(parents),
      pointer<uint8_t>(has_parent),
      num_requests,
      block_size,
      seed,
  };
  py::array_t<uint64_t> keys(hash::num_block_hashes(params));
  uint64_t* const out = keys.mutable_data();
  {
    const py::gil_scoped_release release;
    hash::block_hashes(params, out, num_threads);
  }
  return keys;
}

}  // namespace

void bind_hash(py::module_& m) {
  m.def("block_hashes", &block_hashes, "See csrc/hash/block_hashes.h; addresses are not checked.",
        py::arg("tokens"), py::arg("num_tokens"), py::arg("cu_seqlens"), py::arg("parents"),
        py::arg("has_parent"), py::arg("num_requests"), py::arg("block_size"), py::arg("seed"),
        py::arg("num_threads"));
}

}  // namespace mk::host
