#include "store/checksum.h"

#include <algorithm>
#include <cstring>

#include "common/copy_bytes.h"
#include "common/run_copier.h"
#include "store/xxh3.h"

#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

namespace mk::store {
namespace {

constexpr uint64_t kStripe = XXH_STRIPE_LEN;

uint64_t as_checksum(uint64_t hash) { return hash == 0 ? 1 : hash; }

// Short inputs are hashed in another way, without stripes.
bool has_stripes(uint64_t num_bytes) { return num_bytes > XXH3_MIDSIZE_MAX; }

// Only of objects that are copied out: into a pool, stores past the cache were no faster.
bool is_streamed(uint64_t num_bytes) {
  return num_bytes >= static_cast<uint64_t>(stream_from_bytes()) && Xxh3::get().add_streamed;
}

}  // namespace

uint64_t checksum_of(const char* data, uint64_t num_bytes) {
  return as_checksum(Xxh3::get().hash(data, num_bytes));
}

struct Checksum::State {
  XXH3_state_t hash;
};

Checksum::Checksum() : state_(new State) {
  XXH3_INITSTATE(&state_->hash);
  begin();
}
Checksum::~Checksum() = default;

void Checksum::begin() { XXH3_64bits_reset(&state_->hash); }

void Checksum::add(const void* data, uint64_t num_bytes) {
  Xxh3::get().update(&state_->hash, data, num_bytes);
}

uint64_t Checksum::value() const { return as_checksum(XXH3_64bits_digest(&state_->hash)); }

HashedCopy::HashedCopy(const char* object, uint64_t num_bytes, Direction direction)
    : object_(object),
      num_bytes_(num_bytes),
      num_stripes_(has_stripes(num_bytes) ? (num_bytes - 1) / kStripe : 0),
      is_streamed_(direction == Direction::kOut && is_streamed(num_bytes)),
      accumulators_ XXH3_INIT_ACC {}

void HashedCopy::add(char* dst, const char* src, uint64_t num_bytes) {
  const uint64_t head = std::min((kStripe - done_ % kStripe) % kStripe, num_bytes);
  copy_part(dst, src, head);
  const uint64_t left = num_stripes_ - std::min(num_stripes_, done_ / kStripe);
  const uint64_t count = std::min((num_bytes - head) / kStripe, left);
  if (count > 0) {
    const Xxh3& xxh3 = Xxh3::get();
    const auto add = is_streamed_ ? xxh3.add_streamed : xxh3.add;
    add(accumulators_, done_ / kStripe, count, src + head, dst + head);
    done_ += count * kStripe;
  }
  const uint64_t added = head + count * kStripe;
  copy_part(dst + added, src + added, num_bytes - added);
}

void HashedCopy::skip(uint64_t num_bytes) { finish_stripes(done_ + num_bytes); }

// Bytes that do not fill a stripe, or are not to be added as stripes.
void HashedCopy::copy_part(char* dst, const char* src, uint64_t num_bytes) {
  if (num_bytes == 0) return;
  copy_bytes(dst, src, num_bytes);
  finish_stripes(done_ + num_bytes);
}

// Adds those stripes that end up to `done`, from the object.
void HashedCopy::finish_stripes(uint64_t done) {
  const uint64_t first = done_ / kStripe, end = std::min(done / kStripe, num_stripes_);
  if (first < end) {
    Xxh3::get().add(accumulators_, first, end - first, object_ + first * kStripe, nullptr);
  }
  done_ = done;
}

uint64_t HashedCopy::value() const {
  if (!has_stripes(num_bytes_)) return checksum_of(object_, num_bytes_);
  // As XXH3 ends a long input: its last 64 bytes are a stripe, with a secret of their own.
  const xxh_u8* const last_secret =
      XXH3_kSecret + XXH_SECRET_DEFAULT_SIZE - XXH_STRIPE_LEN - XXH_SECRET_LASTACC_START;
  XXH_ALIGN(XXH_ACC_ALIGN) uint64_t sums[XXH_ACC_NB];
  std::memcpy(sums, accumulators_, sizeof(sums));
  XXH3_accumulate_512(sums, object_ + num_bytes_ - kStripe, last_secret);
  return as_checksum(
      XXH3_mergeAccs(sums, XXH3_kSecret + XXH_SECRET_MERGEACCS_START, num_bytes_ * XXH_PRIME64_1));
}

}  // namespace mk::store
