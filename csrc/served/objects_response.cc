#include "served/objects_response.h"

#include <algorithm>
#include <cstddef>

#include "common/check.h"
#include "store/checksum.h"

namespace mk::served {
namespace {

using transfer::Deadline;
using transfer::RpcResponse;

// Compares objects with their reported checksums, while their bytes arrive in order.
class Comparison {
 public:
  Comparison(const std::vector<ReadRow>& rows, bool verify, bool* is_right)
      : rows_(rows), verify_(verify), is_right_(is_right) {
    begin();
  }

  // The next part of an object; without an address it was discarded.
  void add(const iovec& part) {
    is_looked_at_ &= part.iov_base != nullptr;
    if (is_looked_at_) checksum_.add(part.iov_base, part.iov_len);
    left_ -= part.iov_len;
    if (left_ > 0) return;
    end();
    begin();
  }

 private:
  // Advances to the next object that has bytes.
  void begin() {
    for (; at_ < rows_.size(); end()) {
      left_ = rows_[at_].num_bytes;
      is_looked_at_ =
          verify_ && rows_[at_].status == ObjectStatus::kDone && rows_[at_].checksum != 0;
      checksum_.begin();
      if (left_ > 0) return;
    }
  }
  void end() {
    is_right_[at_] = !is_looked_at_ || checksum_.value() == rows_[at_].checksum;
    ++at_;
  }

  const std::vector<ReadRow>& rows_;
  const bool verify_;
  bool* const is_right_;
  store::Checksum checksum_;
  size_t at_ = 0;
  uint64_t left_ = 0;  // of the current object
  bool is_looked_at_ = false;
};

// Processes this many bytes at a time: they are examined in the cache while the next ones arrive.
template <class Body>
void for_each_step(std::vector<iovec> parts, const Body& body) {
  constexpr uint64_t kStepBytes = 256 << 10;
  std::vector<iovec> step;
  for (size_t i = 0; i < parts.size(); body(step)) {
    step.clear();
    for (uint64_t room = kStepBytes; i < parts.size() && room > 0;) {
      iovec& part = parts[i];
      const uint64_t size = std::min<uint64_t>(part.iov_len, room);
      step.push_back({part.iov_base, size});
      room -= size;
      part.iov_len -= size;
      if (part.iov_base) part.iov_base = static_cast<char*>(part.iov_base) + size;
      if (part.iov_len == 0) ++i;
    }
  }
}

void add_parts(const Places& places, uint64_t num_bytes, std::vector<iovec>& parts) {
  if (places.empty() && num_bytes > 0) parts.push_back({nullptr, num_bytes});
  if (places.empty()) return;
  const uint64_t total = total_of(places);
  MK_CHECK(total == num_bytes, "receive: places must be of the ", num_bytes,
           " bytes that are sent, got ", total);
  for (const auto& [address, size] : places) {
    if (size > 0) parts.push_back({reinterpret_cast<void*>(address), size});
  }
}

}  // namespace

uint64_t total_of(const Places& places) {
  uint64_t total = 0;
  for (const auto& [address, size] : places) {
    if (__builtin_add_overflow(total, size, &total)) return UINT64_MAX;
  }
  return total;
}

std::vector<iovec> ObjectsResponse::parts_of(const std::vector<Places>& places) const {
  MK_CHECK(places.size() == rows_.size(), "receive: places must be ", rows_.size(), ", got ",
           places.size());
  std::vector<iovec> parts;
  for (size_t i = 0; i < rows_.size(); ++i) add_parts(places[i], rows_[i].num_bytes, parts);
  return parts;
}

void ObjectsResponse::receive(const std::vector<Places>& places, bool verify,
                              const Deadline& deadline, bool* is_right) {
  std::vector<iovec> parts;
  std::unique_ptr<RpcResponse> reply;
  {
    const std::lock_guard lock(mutex_);
    MK_CHECK(reply_, "receive: reply must be open, got one that was received or closed");
    parts = parts_of(places);
    reply = std::move(reply_);
  }
  Comparison comparison(rows_, verify, is_right);
  for_each_step(std::move(parts), [&](const std::vector<iovec>& step) {
    reply->receive(step, deadline);
    for (const iovec& part : step) comparison.add(part);
  });
}

void ObjectsResponse::close() {
  std::unique_ptr<RpcResponse> reply;
  const std::lock_guard lock(mutex_);
  reply = std::move(reply_);  // which ends once the mutex is unlocked
}

}  // namespace mk::served
