// Conversion of a pool's keys and objects to and from Python.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <vector>

#include "store/pool.h"

namespace mk::host {

// [n, 2] uint64: hash and scope, as in Key.
using Keys = pybind11::array_t<uint64_t, pybind11::array::c_style>;

inline size_t num_keys(const Keys& keys) { return static_cast<size_t>(keys.size()) / 2; }

inline const store::Key* keys_of(const Keys& keys) {
  static_assert(sizeof(store::Key) == 2 * sizeof(uint64_t));
  return reinterpret_cast<const store::Key*>(keys.data());
}

inline Keys array_of(const std::vector<store::Key>& keys) {
  const auto count = static_cast<pybind11::ssize_t>(keys.size());
  return Keys({count, pybind11::ssize_t{2}}, reinterpret_cast<const uint64_t*>(keys.data()));
}

// ObjectPin, ObjectPut, and the calls of a pool that make, read and write objects.
void bind_objects(pybind11::module_& m,
                  pybind11::class_<store::Pool, std::shared_ptr<store::Pool>>& pool);

}  // namespace mk::host
