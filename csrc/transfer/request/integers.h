// Integers: a caller's array, of any of the types used for addresses, sizes and ids.
//
//   std::vector<uint64_t> local = non_negative("write_blocks", "local_addresses", integers);
//
// Layer: transfer. They are copied first and checked then, so that what is used is what was
// checked, even if the caller changes them meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace mk::transfer {

struct Integers {
  enum class Type { kInt32, kInt64, kUint64 };

  const void* data;
  Type type;
  size_t count;

  std::string text(uint64_t value) const;  // from the copy, as the caller would write it
};

// Negative numbers become huge ones.
std::vector<uint64_t> copy_of(const Integers& values);

// Throws InvalidArgument naming the first that is negative.
std::vector<uint64_t> non_negative(const char* op, const char* argument, const Integers& values);

// taken[i] = values[indices[i]]. False: an index is not below num_values, or negative.
bool take(const uint64_t* values, size_t num_values, const Integers& indices, uint64_t* taken);

}  // namespace mk::transfer
