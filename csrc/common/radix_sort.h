// radix_sort: a stable sort by 64-bit keys, in time linear in the number of values.
//
//   radix_sort(ranges, [](const Range& range) { return range.address; });
//
// Layer: common. Keys that are close together, or share low bits, take fewer passes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mk {

template <class T, class KeyOf>
void radix_sort(std::vector<T>& values, KeyOf key_of) {
  constexpr size_t kFew = 256;  // not worth the histograms
  constexpr int kMaxDigitBits = 11;
  const auto less = [&](const T& a, const T& b) { return key_of(a) < key_of(b); };
  if (values.size() < kFew) {
    std::stable_sort(values.begin(), values.end(), less);
    return;
  }
  uint64_t low = UINT64_MAX, high = 0, odd = 0;
  for (const T& value : values) {
    const uint64_t key = key_of(value);
    low = std::min(low, key);
    high = std::max(high, key);
    odd |= key ^ key_of(values[0]);
  }
  if (odd == 0) return;
  const int shift = __builtin_ctzll(odd);  // lower bits are the same in all
  const uint64_t most = (high - low) >> shift;
  const int num_bits = 64 - __builtin_clzll(most);
  const int num_rounds = (num_bits + kMaxDigitBits - 1) / kMaxDigitBits;
  const int digit_bits = (num_bits + num_rounds - 1) / num_rounds;
  const uint64_t mask = (uint64_t{1} << digit_bits) - 1;
  std::vector<T> other(values.size());
  std::vector<size_t> starts(mask + 1);
  for (int at = 0; at < num_bits; at += digit_bits) {
    const auto digit = [&](const T& value) {
      return ((key_of(value) - low) >> shift >> at) & mask;
    };
    std::fill(starts.begin(), starts.end(), 0);
    for (const T& value : values) ++starts[digit(value)];
    size_t before = 0;
    for (size_t& start : starts) {
      const size_t count = start;
      start = before;
      before += count;
    }
    for (const T& value : values) other[starts[digit(value)]++] = value;
    values.swap(other);
  }
}

}  // namespace mk
