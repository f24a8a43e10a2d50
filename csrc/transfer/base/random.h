// Random bytes, from the kernel.
//
// Layer: transfer.
#pragma once

#include <sys/random.h>

#include "common/check.h"

namespace mk::transfer {

// A value of a type without padding, made of unpredictable bytes.
template <class Value>
Value random_value() {
  static_assert(sizeof(Value) <= 256, "up to 256 bytes getrandom(2) gives whole");
  Value value;
  MK_SYSCALL(getrandom(&value, sizeof(value), 0), "getrandom");
  return value;
}

}  // namespace mk::transfer
