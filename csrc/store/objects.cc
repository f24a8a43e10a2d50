#include "store/objects.h"

#include <algorithm>
#include <cstring>

#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

namespace mk::store {
namespace {

// Bytes that are copied and then hashed while they are still in the processor's second cache.
constexpr uint64_t kChunk = 128 << 10;

uint64_t as_checksum(uint64_t hash) { return hash == 0 ? 1 : hash; }

void copy_all(char* dst, const Pieces& pieces) {
  for (const Piece& piece : pieces) {
    if (piece.num_bytes) std::memcpy(dst, piece.data, piece.num_bytes);
    dst += piece.num_bytes;
  }
}

uint64_t copy_and_hash(char* dst, const Pieces& pieces) {
  XXH3_state_t state;
  XXH3_INITSTATE(&state);
  XXH3_64bits_reset(&state);
  for (const Piece& piece : pieces) {
    for (uint64_t done = 0; done < piece.num_bytes; done += kChunk) {
      const uint64_t size = std::min(kChunk, piece.num_bytes - done);
      std::memcpy(dst, piece.data + done, size);
      // Of what was written: should the source change meanwhile, the object is whole all the same.
      XXH3_64bits_update(&state, dst, size);
      dst += size;
    }
  }
  return as_checksum(XXH3_64bits_digest(&state));
}

Got copy_from(const Pin& pin, std::optional<uint64_t> offset, const Pieces& pieces, bool verify) {
  const uint64_t wanted = total_bytes(pieces);
  const uint64_t begin = offset.value_or(0);
  if (!offset && wanted < pin.num_bytes) return Got::kTooSmall;
  if (offset && (begin > pin.num_bytes || wanted > pin.num_bytes - begin)) return Got::kOutOfRange;
  const bool is_checked = verify && pin.checksum != 0;
  if (is_checked && checksum_of(pin.data, pin.num_bytes) != pin.checksum) return Got::kDamaged;
  const char* from = pin.data + begin;
  const char* const end = pin.data + pin.num_bytes;
  for (const Piece& piece : pieces) {
    const uint64_t size = std::min(piece.num_bytes, static_cast<uint64_t>(end - from));
    if (size) std::memcpy(piece.data, from, size);
    from += size;
  }
  return Got::kDone;
}

}  // namespace

uint64_t total_bytes(const Pieces& pieces) {
  uint64_t total = 0;
  for (const Piece& piece : pieces) total += piece.num_bytes;
  return total;
}

uint64_t checksum_of(const char* data, uint64_t num_bytes) {
  return as_checksum(XXH3_64bits(data, num_bytes));
}

uint64_t checksum_of(const Pieces& pieces) {
  if (pieces.size() == 1) return checksum_of(pieces[0].data, pieces[0].num_bytes);
  XXH3_state_t state;
  XXH3_INITSTATE(&state);
  XXH3_64bits_reset(&state);
  for (const Piece& piece : pieces) XXH3_64bits_update(&state, piece.data, piece.num_bytes);
  return as_checksum(XXH3_64bits_digest(&state));
}

Key hash_of_name(const char* name, uint64_t num_bytes) {
  const XXH128_hash_t hash = XXH3_128bits(name, num_bytes);
  return {hash.low64, hash.high64};
}

Begun put_from(Pool* pool, const Key& key, const Pieces& pieces, const PutOptions& options) {
  Writing writing;
  const Begun begun = pool->begin(key, total_bytes(pieces), &writing);
  if (begun != Begun::kOpen) return begun;
  uint64_t checksum = 0;
  if (options.checksum) {
    checksum = copy_and_hash(writing.data, pieces);
  } else {
    copy_all(writing.data, pieces);
  }
  pool->commit(writing, checksum, options.retention, options.position);
  return Begun::kOpen;
}

Got get_into(Pool* pool, const Key& key, std::optional<uint64_t> offset, const Pieces& pieces,
             bool verify, uint64_t* object_bytes) {
  const std::optional<Pin> pin = pool->pin(key);
  if (!pin) return Got::kAbsent;
  *object_bytes = pin->num_bytes;
  const Got got = copy_from(*pin, offset, pieces, verify);
  pool->unpin(*pin);
  return got;
}

}  // namespace mk::store
