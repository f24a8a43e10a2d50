// What the CUDA driver of fake_cuda_driver.cc says; set by a test.
#pragma once

#include <cstdint>
#include <vector>

struct FakeAllocation {
  uint64_t begin, end;
  unsigned type;  // CU_MEMORYTYPE_HOST or CU_MEMORYTYPE_DEVICE
  int device;
  uint64_t device_offset;
};

struct FakeDriver {
  std::vector<FakeAllocation> allocations;
  bool is_initialized = false;
  int active_device = -1;       // whose primary context somebody has made
  int num_retained = 0;         // times that it is held
  void* current = nullptr;      // this thread's context
  int num_questions = 0;        // about addresses
  int version = 12080;          // of CUDA
  bool fails = false;           // the next batch
  std::vector<uint64_t> sizes;  // of the last batch
  unsigned order = 0, flags = 0;
  void* stream = nullptr;
};
