// The data of packed tensors that operators receive. Layer: ops.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <type_traits>

#include "common/check.h"

namespace mk::ops {

// The data of a packed tensor of that type and length, on the device of `where`.
template <class T>
T* packed(const char* op, const char* name, const torch::stable::Tensor& tensor,
          torch::headeronly::ScalarType type, int64_t count, const torch::stable::Tensor& where) {
  MK_CHECK(tensor.scalar_type() == type && tensor.is_contiguous() && tensor.numel() == count &&
               tensor.get_device() == where.get_device(),
           op, ": ", name, " must be a packed tensor of ", count,
           " numbers of its type on the device of the other arguments, got ", tensor.numel());
  if constexpr (std::is_const_v<T>) {
    return static_cast<T*>(tensor.const_data_ptr());
  } else {
    return static_cast<T*>(tensor.mutable_data_ptr());
  }
}

// The same of an optional tensor; null if absent.
template <class T>
T* packed(const char* op, const char* name, const std::optional<torch::stable::Tensor>& tensor,
          torch::headeronly::ScalarType type, int64_t count, const torch::stable::Tensor& where) {
  return tensor ? packed<T>(op, name, *tensor, type, count, where) : nullptr;
}

}  // namespace mk::ops
