// Copies whole objects, from any memory into a pool or out of it, in one call.
//
//   put_from(pool.get(), key, {{k.data(), k.size()}, {v.data(), v.size()}}, options);
//   get_into(pool.get(), key, std::nullopt, {{buffer, sizeof(buffer)}}, /*verify=*/true, &size,
//            &counts);
//   pool->count(counts);
//
// Layer: store.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "store/pool.h"

namespace mk::store {

using Pieces = std::vector<Piece>;

uint64_t total_bytes(const Pieces& pieces);

// Copy between one piece and consecutive others, up to the smaller of the two sizes. Copies that
// touch a GPU go into the stream of the other piece or, if that is on the host, of the one.
// `page_locked`: the one piece is page-locked, if it is on the host. Throw Unavailable and
// CudaError, for GPUs.
void gather(const Pieces& pieces, const Piece& dst, bool page_locked);
void scatter(const Piece& src, const Pieces& pieces, bool page_locked);
// Of the object that consists of these pieces, in order; what is on a GPU is copied to the host for
// that. Throws as gather().
uint64_t checksum_of(const Pieces& pieces);

Key hash_of_name(const char* name, uint64_t num_bytes);  // 128 bits, in both words

struct PutOptions {
  bool checksum;
  Retention retention;
  uint16_t position = 0;
};
// Copies the object, the concatenation of the pieces, to where it is being written. Returns its
// checksum; 0: none. Throws as gather().
uint64_t fill(const Pool& pool, const Writing& writing, const Pieces& pieces, bool checksum);
// Throws as Pool::begin, and as gather().
PutState put_from(Pool* pool, const Key& key, const Pieces& pieces, const PutOptions& options);

enum class ReadStatus {
  kDone,
  kAbsent,
  kTooSmall,    // the pieces are, for the object
  kOutOfRange,  // the requested part is, in the object
  kDamaged,     // the checksum differs: nothing of it is in the pieces
  kOther,       // it does not begin with the required head: nothing was copied
};
// The reads below add to `counts`, for Pool::count, if they are kDone or kAbsent.
// Fills the pieces in order, from `offset` on; without an offset they receive the whole object and
// may be larger. `object_bytes` is the object's size, if it exists. An object without a checksum is
// not verified. Throws as scatter().
ReadStatus get_into(Pool* pool, const Key& key, std::optional<uint64_t> offset,
                    const Pieces& pieces, bool verify, uint64_t* object_bytes, ReadCounts* counts);

// What an object must begin with, but for the bytes [free_begin, free_end) of it.
struct Head {
  std::string_view bytes;
  uint64_t free_begin = 0;
  uint64_t free_end = 0;
};
// The same for all that follows the head; `num_bytes` is the size of that. Of a pool on the host.
ReadStatus get_headed(Pool* pool, const Key& key, const Head& head, const Pieces& pieces,
                      bool verify, uint64_t* num_bytes, ReadCounts* counts);

}  // namespace mk::store
