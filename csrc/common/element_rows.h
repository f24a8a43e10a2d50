// Rows of elements on the CPU: conversion, rotation and sums, with the widest vectors available.
// Layer: common.
#pragma once

#include <cstdint>

#include "common/element.h"
#include "common/rotation.h"

namespace mk {

struct RowFunctions {
  void (*load)(ElementType type, const char* row, int64_t count, float* values);
  void (*store)(ElementType type, const float* values, int64_t count, char* row);
  void (*multiply)(float* values, int64_t count, float factor);
  void (*divide)(float* values, int64_t count, float divisor);
  void (*rotate)(const Rotation& rotation, const float* cos_sin, float* values);
  uint64_t (*sum)(const char* row, int64_t num_bytes, uint64_t index);

  static const RowFunctions& best();  // for this processor
};

}  // namespace mk
