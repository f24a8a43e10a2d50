#include "store/objects.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "common/check.h"
#include "common/copy_bytes.h"
#include "common/fault_guard.h"
#include "common/stream_copy.h"
#include "store/checksum.h"

#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

namespace mk::store {
namespace {

bool is_on_gpu(const Piece& piece) { return piece.device >= 0; }

// As a system call fails to which such memory is passed.
void expect(const std::optional<Fault>& fault) {
  if (fault) throw SystemError(EFAULT, "memory is not accessible: " + fault->describe());
}

bool are_in_host(const Pieces& pieces) {
  return std::none_of(pieces.begin(), pieces.end(), is_on_gpu);
}

// Copies between one piece of memory and others: on the host immediately; those that touch GPUs
// together at the end, grouped by the stream that they run in.
class Copies {
 public:
  Copies(const Piece& one, bool page_locked) : one_(one), page_locked_(page_locked) {}

  void add(const Piece& other, char* dst, const char* src, uint64_t num_bytes) {
    if (!is_on_gpu(one_) && !is_on_gpu(other)) {
      expect(guarded([&]() noexcept { copy_bytes(dst, src, num_bytes); }));
      return;
    }
    const Piece& where = is_on_gpu(other) ? other : one_;
    by_stream_[{where.device, where.stream}].push_back(
        {reinterpret_cast<uint64_t>(dst), reinterpret_cast<uint64_t>(src), num_bytes});
    // Whether the other pieces are page-locked is unknown.
    all_page_locked_ &= is_on_gpu(other) && (is_on_gpu(one_) || page_locked_);
  }

  void run() const {
    for (const auto& [where, copies] : by_stream_) {
      copy_in_stream(copies, all_page_locked_, where.first, where.second);
    }
  }

 private:
  const Piece one_;
  const bool page_locked_;
  bool all_page_locked_ = true;  // all host memory involved
  std::map<std::pair<int, uint64_t>, std::vector<StreamCopy>> by_stream_;
};

uint64_t copy_and_hash(char* dst, uint64_t num_bytes, const Pieces& pieces) {
  HashedCopy copy(dst, num_bytes, HashedCopy::Direction::kIn);
  expect(guarded([&]() noexcept {
    for (const Piece& piece : pieces) {
      copy.add(dst, piece.data, piece.num_bytes);
      dst += piece.num_bytes;
    }
  }));
  return copy.value();
}

// Copies the object from `begin` on; both are on the host. If it is damaged: false, and the pieces
// have zeros where they had it.
bool copy_and_verify(const Pin& pin, uint64_t begin, const Pieces& pieces) {
  HashedCopy copy(pin.data, pin.num_bytes, HashedCopy::Direction::kOut);
  copy.skip(begin);
  uint64_t at = begin;
  expect(guarded([&]() noexcept {
    for (const Piece& piece : pieces) {
      const uint64_t size = std::min(piece.num_bytes, pin.num_bytes - at);
      copy.add(piece.data, pin.data + at, size);
      at += size;
    }
  }));
  copy.skip(pin.num_bytes - at);
  if (copy.value() == pin.checksum) return true;
  at = begin;
  for (const Piece& piece : pieces) {
    const uint64_t size = std::min(piece.num_bytes, pin.num_bytes - at);
    if (size > 0) std::memset(piece.data, 0, size);
    at += size;
  }
  return false;
}

bool begins_with(const Pin& pin, const Head& head) {
  if (pin.num_bytes < head.bytes.size()) return false;
  const std::string_view found(pin.data, head.bytes.size());
  return found.substr(0, head.free_begin) == head.bytes.substr(0, head.free_begin) &&
         found.substr(head.free_end) == head.bytes.substr(head.free_end);
}

// The whole pinned object, or the part of it from `begin` on, into pieces that have room for it.
ReadStatus copy_from(const Pool& pool, const Pin& pin, uint64_t begin, const Pieces& pieces,
                     bool verify, ReadCounts* counts) {
  const bool is_checked = verify && pin.checksum != 0;
  const uint64_t left = pin.num_bytes - begin;
  if (is_checked && pool.device() < 0 && are_in_host(pieces)) {
    if (!copy_and_verify(pin, begin, pieces)) return ReadStatus::kDamaged;
  } else {
    if (is_checked && checksum_of({pool.piece(pin.data, pin.num_bytes)}) != pin.checksum) {
      return ReadStatus::kDamaged;
    }
    scatter(pool.piece(pin.data + begin, left), pieces, pool.is_page_locked());
  }
  counts->num_hits += 1;
  counts->num_bytes += std::min(left, total_bytes(pieces));
  return ReadStatus::kDone;
}

// What `read` makes of an object while it is pinned.
template <class Read>
ReadStatus with_pin(Pool* pool, const Key& key, ReadCounts* counts, const Read& read) {
  const std::optional<Pin> pin = pool->pin(key);
  if (!pin) {
    counts->num_misses += 1;
    return ReadStatus::kAbsent;
  }
  try {
    const ReadStatus status = read(*pin);
    pool->unpin(*pin);
    return status;
  } catch (...) {
    pool->unpin(*pin);
    throw;
  }
}

}  // namespace

uint64_t total_bytes(const Pieces& pieces) {
  uint64_t total = 0;
  for (const Piece& piece : pieces) total += piece.num_bytes;
  return total;
}

Key hash_of_name(const char* name, uint64_t num_bytes) {
  const XXH128_hash_t hash = XXH3_128bits(name, num_bytes);
  return {hash.low64, hash.high64};
}

void gather(const Pieces& pieces, const Piece& dst, bool page_locked) {
  Copies copies(dst, page_locked);
  uint64_t done = 0;
  for (const Piece& piece : pieces) {
    const uint64_t size = std::min(piece.num_bytes, dst.num_bytes - done);
    if (size > 0) copies.add(piece, dst.data + done, piece.data, size);
    done += size;
  }
  copies.run();
}

void scatter(const Piece& src, const Pieces& pieces, bool page_locked) {
  Copies copies(src, page_locked);
  uint64_t done = 0;
  for (const Piece& piece : pieces) {
    const uint64_t size = std::min(piece.num_bytes, src.num_bytes - done);
    if (size > 0) copies.add(piece, piece.data, src.data + done, size);
    done += size;
  }
  copies.run();
}

uint64_t checksum_of(const Pieces& pieces) {
  if (!are_in_host(pieces)) {
    std::vector<char> copy(total_bytes(pieces));
    gather(pieces, {copy.data(), copy.size()}, /*page_locked=*/false);
    return checksum_of(copy.data(), copy.size());
  }
  uint64_t sum = 0;
  if (pieces.size() == 1) {
    expect(guarded([&]() noexcept { sum = checksum_of(pieces[0].data, pieces[0].num_bytes); }));
    return sum;
  }
  Checksum checksum;
  for (const Piece& piece : pieces) {
    expect(guarded([&]() noexcept { checksum.add(piece.data, piece.num_bytes); }));
  }
  return checksum.value();
}

uint64_t fill(const Pool& pool, const Writing& writing, const Pieces& pieces, bool checksum) {
  const Piece target = pool.piece(writing.data, writing.num_bytes);
  if (checksum && are_in_host(pieces) && !is_on_gpu(target)) {
    return copy_and_hash(writing.data, writing.num_bytes, pieces);
  }
  gather(pieces, target, pool.is_page_locked());
  if (!checksum) return 0;
  // What came from the host need not be copied back, unless it changed meanwhile.
  return are_in_host(pieces) ? checksum_of(pieces) : checksum_of({target});
}

PutState put_from(Pool* pool, const Key& key, const Pieces& pieces, const PutOptions& options) {
  Writing writing;
  const PutState state = pool->begin(key, total_bytes(pieces), &writing);
  if (state != PutState::kOpen) return state;
  try {
    const uint64_t checksum = fill(*pool, writing, pieces, options.checksum);
    pool->commit(writing, checksum, options.retention, options.position);
  } catch (...) {
    pool->give_up({writing});
    throw;
  }
  return PutState::kOpen;
}

ReadStatus get_into(Pool* pool, const Key& key, std::optional<uint64_t> offset,
                    const Pieces& pieces, bool verify, uint64_t* object_bytes, ReadCounts* counts) {
  return with_pin(pool, key, counts, [&](const Pin& pin) {
    *object_bytes = pin.num_bytes;
    const uint64_t wanted = total_bytes(pieces);
    const uint64_t begin = offset.value_or(0);
    if (!offset && wanted < pin.num_bytes) return ReadStatus::kTooSmall;
    if (offset && (begin > pin.num_bytes || wanted > pin.num_bytes - begin))
      return ReadStatus::kOutOfRange;
    return copy_from(*pool, pin, begin, pieces, verify, counts);
  });
}

ReadStatus get_headed(Pool* pool, const Key& key, const Head& head, const Pieces& pieces,
                      bool verify, uint64_t* num_bytes, ReadCounts* counts) {
  return with_pin(pool, key, counts, [&](const Pin& pin) {
    if (!begins_with(pin, head)) return ReadStatus::kOther;
    *num_bytes = pin.num_bytes - head.bytes.size();
    if (total_bytes(pieces) < *num_bytes) return ReadStatus::kTooSmall;
    return copy_from(*pool, pin, head.bytes.size(), pieces, verify, counts);
  });
}

}  // namespace mk::store
