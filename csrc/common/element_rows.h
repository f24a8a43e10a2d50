// Rows of elements on the CPU: conversion, rotation and sums, with the widest vectors available.
// Layer: common.
#pragma once

#include <cstdint>

#include "common/element.h"
#include "common/rotation.h"

namespace mk {

// Rows to sum, one every `stride` bytes; the words of each are numbered from `index`, and those of
// the next one from `index_step` more.
struct SummedRows {
  const char* first;
  int64_t row_bytes;
  int64_t count;
  int64_t stride;
  uint64_t index;
  uint64_t index_step;
  const char* next;  // prefetched: rows at the same distances from here
  char* copy;        // of copy_and_sum(): where the rows go, one every `copy_stride` bytes
  int64_t copy_stride;
};

struct RowFunctions {
  void (*load)(ElementType type, const char* row, int64_t count, float* values);
  void (*store)(ElementType type, const float* values, int64_t count, char* row);
  void (*multiply)(float* values, int64_t count, float factor);
  void (*divide)(float* values, int64_t count, float divisor);
  void (*rotate)(const Rotation& rotation, const float* cos_sin, float* values);
  uint64_t (*sum)(const SummedRows& rows);
  // Rows must be whole lines of 64 bytes, copies begin at one. Stores bypass the cache:
  // fence_streamed_stores() must follow.
  uint64_t (*copy_and_sum)(const SummedRows& rows);

  static const RowFunctions& best();  // for this processor
};

}  // namespace mk
