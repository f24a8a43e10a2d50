// The checksum of an object: XXH3-64 of all its bytes, with 0 replaced by 1.
//
//   HashedCopy copy(object, num_bytes, HashedCopy::Direction::kIn);
//   copy.add(object, k, k_bytes);
//   copy.add(object + k_bytes, v, v_bytes);
//   const uint64_t checksum = copy.value();
//
// Layer: store.
#pragma once

#include <cstdint>
#include <memory>

namespace mk::store {

uint64_t checksum_of(const char* data, uint64_t num_bytes);

// The same, computed incrementally.
class Checksum {
 public:
  Checksum();
  Checksum(const Checksum&) = delete;
  ~Checksum();

  void begin();  // restarts
  void add(const void* data, uint64_t num_bytes);
  uint64_t value() const;

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

// The same, computed while the object is copied between consecutive host memory and any number of
// places: memory is read once, so a copy from outside the cache takes hardly longer than without.
// Whatever others write to the other side of the copy meanwhile, the checksum is that of the
// object.
class HashedCopy {
 public:
  enum class Direction { kIn, kOut };  // of the object, which no one else writes to
  HashedCopy(const char* object, uint64_t num_bytes, Direction direction);

  // The next bytes of the object; one of the two addresses is in it.
  void add(char* dst, const char* src, uint64_t num_bytes);
  // The next bytes of the object, which are not copied.
  void skip(uint64_t num_bytes);
  // When all bytes were added or skipped.
  uint64_t value() const;

 private:
  void copy_part(char* dst, const char* src, uint64_t num_bytes);
  void finish_stripes(uint64_t done);

  const char* const object_;
  const uint64_t num_bytes_;
  const uint64_t num_stripes_;  // without the one that ends with the last byte
  const bool is_streamed_;      // past the cache
  uint64_t done_ = 0;
  alignas(64) uint64_t accumulators_[8];
};

}  // namespace mk::store
