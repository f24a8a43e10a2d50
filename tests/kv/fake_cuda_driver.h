// What the CUDA driver of fake_cuda_driver.cc says; set by a test.
#pragma once

#include <cstdint>
#include <vector>

struct FakeAllocation {
  uint64_t begin, end;
  unsigned type;  // CU_MEMORYTYPE_HOST or CU_MEMORYTYPE_DEVICE
  int device;
  uint64_t device_offset;
  uint64_t id = 0;          // CU_POINTER_ATTRIBUTE_BUFFER_ID
  bool is_virtual = false;  // of the virtual memory management calls
};

constexpr int kFirstHandle = 10;  // no ordinal is a handle, so who confuses them fails

struct FakeDriver {
  std::vector<FakeAllocation> allocations;
  bool is_initialized = false;  // cuInit was called
  int active_device = -1;       // whose primary context somebody has made
  int num_retained = 0;         // times that it is held
  void* current = nullptr;      // this thread's context
  std::vector<void*> stack;     // those below it
  int num_questions = 0;        // about addresses
  int version = 12080;          // of CUDA
  bool fails = false;           // the next batch
  std::vector<uint64_t> sizes;  // of the last batch
  unsigned order = 0, flags = 0;
  void* stream = nullptr;
  void* context = nullptr;  // that was current then

  FakeAllocation find(uint64_t address) const {  // all zero if it is of none
    for (const FakeAllocation& a : allocations) {
      if (a.begin <= address && address < a.end) return a;
    }
    return {};
  }
};

extern "C" FakeDriver fake_driver;
