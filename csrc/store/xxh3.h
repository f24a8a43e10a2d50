// Xxh3: XXH3-64, with the vectors that this processor has. The values do not depend on them.
//
//   const uint64_t hash = Xxh3::get().hash(data, num_bytes);
//
// Layer: store.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mk::store {

struct Xxh3 {
  uint64_t (*hash)(const void* data, size_t num_bytes);
  void (*update)(void* state, const void* data, size_t num_bytes);  // of an XXH3_state_t

  static const Xxh3& get();
  static const Xxh3* avx2();  // null: not of this architecture
};

}  // namespace mk::store
