// Whole objects in one call: bytes from anywhere into a pool, and out of it.
//
//   put_from(pool.get(), key, {{k.data(), k.size()}, {v.data(), v.size()}}, options);
//   get_into(pool.get(), key, std::nullopt, {{buffer, sizeof(buffer)}}, /*verify=*/true, &size);
//
// A checksum is XXH3-64 of all bytes of the object, 1 where that is 0. Layer: store.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "store/pool.h"

namespace mk::store {

using Pieces = std::vector<Piece>;

uint64_t total_bytes(const Pieces& pieces);
uint64_t checksum_of(const char* data, uint64_t num_bytes);

// The same of bytes that come one after the other.
class Checksum {
 public:
  Checksum();
  Checksum(const Checksum&) = delete;
  ~Checksum();

  void begin();  // anew
  void add(const void* data, uint64_t num_bytes);
  uint64_t value() const;

 private:
  struct State;
  const std::unique_ptr<State> state_;
};
// One piece of memory from and to others, one behind the other: as many bytes as they are, or as
// there are, whichever is less. What touches a GPU is copied in the stream of that one of the
// others, or if it is in the host, in that of the one. `page_locked`: the one is, if it is in the
// host. Throws Unavailable and CudaError, of GPUs.
void gather(const Pieces& pieces, const Piece& dst, bool page_locked);
void scatter(const Piece& src, const Pieces& pieces, bool page_locked);
// Of the object that pieces are, one behind the other; what is on a GPU is copied to the host for
// it. Throws as gather().
uint64_t checksum_of(const Pieces& pieces);

Key hash_of_name(const char* name, uint64_t num_bytes);  // 128 bits: in both words

struct PutOptions {
  bool checksum;
  Retention retention;
  uint16_t position = 0;
};
// The object is the pieces one behind the other. Throws as Pool::begin does, and as gather().
Begun put_from(Pool* pool, const Key& key, const Pieces& pieces, const PutOptions& options);

enum class Got {
  kDone,
  kAbsent,
  kTooSmall,    // the pieces, for the object
  kOutOfRange,  // what was asked for, in the object
  kDamaged,     // the checksum is another: nothing was copied
};
// Fills the pieces, one behind the other, from `offset` on; without an offset they take the whole
// object and may be larger. `object_bytes` is the object's size, if it is there. An object without
// a checksum is not verified. Throws as scatter().
Got get_into(Pool* pool, const Key& key, std::optional<uint64_t> offset, const Pieces& pieces,
             bool verify, uint64_t* object_bytes);

}  // namespace mk::store
