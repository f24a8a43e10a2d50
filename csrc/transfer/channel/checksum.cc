#include "transfer/channel/checksum.h"

#include <algorithm>
#include <optional>

#define XXH_INLINE_ALL
#include "common/check.h"
#include "common/fault_guard.h"
#include "xxhash/xxhash.h"

namespace mk::transfer {
namespace {

constexpr uint64_t kStepBytes = 4ull << 20;  // between checks of the limit

}  // namespace

uint64_t Checksummer::sum(const Range& range) {
  auto* const data = reinterpret_cast<char*>(range.address);
  since_check_ += range.num_bytes;
  if (since_check_ > kStepBytes) {
    limit_.check();
    since_check_ = 0;
  }
  const auto expect = [](const std::optional<Fault>& fault) {
    if (fault) throw Inaccessible(fault->describe());
  };
  if (gpus_.empty() && range.num_bytes <= kStepBytes) {
    uint64_t sum = 0;
    expect(guarded([&]() noexcept { sum = XXH3_64bits(data, range.num_bytes); }));
    return sum;
  }
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  const auto add = [&](iovec* parts, size_t num_parts) {
    expect(guarded([&]() noexcept {
      for (size_t i = 0; i < num_parts; ++i) {
        XXH3_64bits_update(&state, parts[i].iov_base, parts[i].iov_len);
      }
    }));
  };
  for (uint64_t done = 0; done < range.num_bytes;) {
    limit_.check();
    const uint64_t step = std::min(range.num_bytes - done, kStepBytes);
    parts_.assign(1, {data + done, step});
    staging_.gather(parts_, gpus_, limit_, add);
    done += step;
  }
  return XXH3_64bits_digest(&state);
}

void Checksummer::sum(const Request& request, const Piece& piece,
                      std::vector<uint64_t>& checksums) {
  checksums.clear();
  for_each_range(request, piece, [&](uint64_t local, uint64_t, uint64_t num_bytes) {
    checksums.push_back(sum({local, num_bytes}));
  });
}

size_t Checksummer::count_equal(const std::vector<Range>& ranges,
                                const std::vector<uint64_t>& checksums) {
  size_t i = 0;
  while (i < ranges.size() && sum(ranges[i]) == checksums[i]) ++i;
  return i;
}

ErrorReason checksum_reason(uint64_t remote, uint64_t local, uint64_t num_bytes) {
  return {concat("checksum: remote range ", describe({remote, num_bytes}),
                 " differs from local range ", describe({local, num_bytes})),
          FailureKind::kChecksum};
}

ErrorReason checksum_reason(const Request& request, const Piece& piece, size_t index) {
  ErrorReason reason;
  size_t i = 0;
  for_each_range(request, piece, [&](uint64_t local, uint64_t remote, uint64_t num_bytes) {
    if (i++ == index) reason = checksum_reason(remote, local, num_bytes);
  });
  return reason;
}

}  // namespace mk::transfer
