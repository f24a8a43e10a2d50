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
  // Adds `count` stripes of 64 bytes to the eight accumulators of an input, of which `first`
  // stripes were added before, and copies them to dst, if that is not null. What is stored is what
  // is hashed, even if others write to src meanwhile.
  void (*add)(uint64_t* accumulators, uint64_t first, uint64_t count, const char* src, char* dst);
  // The same with stores past the cache, if no one writes to src. Null: not with these
  // instructions.
  void (*add_streamed)(uint64_t* accumulators, uint64_t first, uint64_t count, const char* src,
                       char* dst);

  static const Xxh3& get();    // the best of the following
  static const Xxh3& plain();  // what every processor of this architecture has
  static const Xxh3* avx2();   // null: not of this architecture
};

}  // namespace mk::store
