// What cuPointerGetAttributes answers, for the drivers that tests make up.
#pragma once

#include <cuda.h>

namespace fake {

struct PointerFacts {
  unsigned type;
  int device;
  CUdeviceptr on_device;  // 0 if no GPU knows the address
  CUdeviceptr begin, end;
};

inline CUresult answer_attributes(unsigned count, const CUpointer_attribute* attributes,
                                  void** values, const PointerFacts& facts) {
  for (unsigned i = 0; i < count; ++i) {
    switch (attributes[i]) {
      case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *static_cast<unsigned*>(values[i]) = facts.type;
        break;
      case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *static_cast<int*>(values[i]) = facts.device;
        break;
      case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *static_cast<CUdeviceptr*>(values[i]) = facts.on_device;
        break;
      case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *static_cast<CUdeviceptr*>(values[i]) = facts.begin;
        break;
      case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *static_cast<size_t*>(values[i]) = facts.end - facts.begin;
        break;
      default:
        return CUDA_ERROR_INVALID_VALUE;
    }
  }
  return CUDA_SUCCESS;
}

}  // namespace fake
