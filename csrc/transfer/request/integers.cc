#include "transfer/request/integers.h"

#include <algorithm>

#include "common/check.h"

namespace mk::transfer {

std::string Integers::text(uint64_t value) const {
  return type == Type::kUint64 ? std::to_string(value)
                               : std::to_string(static_cast<int64_t>(value));
}

std::vector<uint64_t> copy_of(const Integers& values) {
  if (values.type == Integers::Type::kInt32) {
    const auto* const begin = static_cast<const int32_t*>(values.data);
    std::vector<uint64_t> copy(values.count);
    std::transform(begin, begin + values.count, copy.begin(),
                   [](int32_t value) { return static_cast<uint64_t>(int64_t{value}); });
    return copy;
  }
  const auto* const begin = static_cast<const uint64_t*>(values.data);
  return {begin, begin + values.count};
}

std::vector<uint64_t> non_negative(const char* op, const char* argument, const Integers& values) {
  std::vector<uint64_t> copy = copy_of(values);
  if (values.type == Integers::Type::kUint64) return copy;
  uint64_t any = 0;
  for (const uint64_t value : copy) any |= value;
  if (any >> 63 == 0) return copy;
  const auto is_negative = [](uint64_t value) { return value >> 63 != 0; };
  const size_t i = std::find_if(copy.begin(), copy.end(), is_negative) - copy.begin();
  throw InvalidArgument(concat(op, ": ", argument, "[", i,
                               "] must be an integer from 0 to 2**64 - 1, got ",
                               values.text(copy[i])));
}

bool take(const uint64_t* values, size_t num_values, const Integers& indices, uint64_t* taken) {
  const auto take_each = [&](const auto* index) {
    for (size_t i = 0; i < indices.count; ++i) {
      const auto at = static_cast<uint64_t>(index[i]);  // of a negative one: huge
      if (at >= num_values) return false;
      taken[i] = values[at];
    }
    return true;
  };
  return indices.type == Integers::Type::kInt32
             ? take_each(static_cast<const int32_t*>(indices.data))
             : take_each(static_cast<const uint64_t*>(indices.data));
}

}  // namespace mk::transfer
