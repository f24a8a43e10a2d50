// Converts a tensor's dtype to the ElementType of csrc/common/element.h. Layer: ops.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "common/check.h"
#include "common/element.h"

namespace mk::ops {

inline ElementType element_type_of(const torch::stable::Tensor& tensor) {
  using torch::headeronly::ScalarType;
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return ElementType::kFloat32;
    case ScalarType::Half:
      return ElementType::kFloat16;
    case ScalarType::BFloat16:
      return ElementType::kBFloat16;
    case ScalarType::Float8_e4m3fn:
      return ElementType::kFloat8E4M3;
    case ScalarType::Float8_e5m2:
      return ElementType::kFloat8E5M2;
    default:
      throw InvalidArgument("tensors must be float32, float16, bfloat16, float8_e4m3fn or e5m2");
  }
}

}  // namespace mk::ops
