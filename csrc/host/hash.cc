#include "hash/block_hashes.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <string_view>
#include <vector>

#include "host/gil.h"
#include "host/module.h"

namespace py = pybind11;

namespace mk::host {
namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

py::array_t<uint64_t> block_hashes(const Array<uint32_t>& tokens, int64_t block_size, uint64_t seed,
                                   int num_threads, const std::optional<Array<int64_t>>& cu_seqlens,
                                   const std::optional<Array<uint64_t>>& parents,
                                   const std::optional<Array<uint8_t>>& has_parent,
                                   const std::optional<Array<uint64_t>>& extras,
                                   const std::optional<Array<uint8_t>>& has_extra) {
  const int64_t one_request[] = {0, tokens.size()};
  const hash::BlockHashesParams params{
      tokens.data(),
      cu_seqlens ? cu_seqlens->data() : one_request,
      parents ? parents->data() : nullptr,
      has_parent ? has_parent->data() : nullptr,
      extras ? extras->data() : nullptr,
      has_extra ? has_extra->data() : nullptr,
      cu_seqlens ? cu_seqlens->size() - 1 : 1,
      block_size,
      seed,
  };
  py::array_t<uint64_t> keys(hash::num_block_hashes(params));
  uint64_t* const out = keys.mutable_data();
  {
    const GilReleased released;
    hash::block_hashes(params, out, num_threads);
  }
  return keys;
}

py::array_t<uint64_t> hash_extras(const std::vector<py::bytes>& encodings, uint64_t seed) {
  py::array_t<uint64_t> hashes(static_cast<py::ssize_t>(encodings.size()));
  uint64_t* out = hashes.mutable_data();
  for (const py::bytes& encoding : encodings) {
    const std::string_view bytes = encoding;
    *out++ = hash::hash_extra(bytes.data(), bytes.size(), seed);
  }
  return hashes;
}

// The items of a list or tuple as uint32, or None if one is not an int in [0, 2**32): the caller
// reports which. Takes a quarter of the time of array.array, which calls __index__ on every item.
std::optional<py::array_t<uint32_t>> token_array(const py::object& tokens) {
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(tokens.ptr());
  PyObject** const items = PySequence_Fast_ITEMS(tokens.ptr());
  py::array_t<uint32_t> result(size);
  uint32_t* const out = result.mutable_data();
  for (Py_ssize_t i = 0; i < size; ++i) {
    if (!PyLong_CheckExact(items[i])) return std::nullopt;
    const unsigned long value = PyLong_AsUnsignedLong(items[i]);
    if (value > UINT32_MAX) {  // also on error
      PyErr_Clear();
      return std::nullopt;
    }
    out[i] = static_cast<uint32_t>(value);
  }
  return result;
}

}  // namespace

void bind_hash(py::module_& m) {
  m.def("block_hashes", &block_hashes, "See csrc/hash/block_hashes.h; contents are not checked.",
        py::arg("tokens"), py::arg("block_size"), py::arg("seed"), py::arg("num_threads"),
        py::arg("cu_seqlens"), py::arg("parents"), py::arg("has_parent"), py::arg("extras"),
        py::arg("has_extra"));
  m.def("hash_extras", &hash_extras, "hash_extra of each, [n] uint64.", py::arg("encodings"),
        py::arg("seed"));
  m.def("token_array", &token_array, "A list or tuple as uint32; None if an item does not fit.",
        py::arg("tokens"));
}

}  // namespace mk::host
