#include "served/object_service.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include "store/checksum.h"
#include "store/objects.h"
#include "transfer/base/error.h"
#include "transfer/wire/wire.h"

// The objects of a request are those of a prompt, in order. They are read and stored from last to
// first, so that LRU evicts the tail of a prompt before its head.
namespace mk::served {
namespace {

constexpr size_t kMaxNoted = 1 << 20;
constexpr uint64_t kMaxCompared = 256ull << 20;  // bytes per request, plus at most an object

using namespace mk::store;
using transfer::Exchange;
using transfer::kMaxRpcPayloadBytes;
using transfer::Refused;

template <class... Parts>
void expect(bool condition, const Parts&... parts) {
  if (!condition)
    throw Refused(transfer::ErrorReason(concat("malformed question: ", parts...),
                                        transfer::FailureKind::kIncompatible));
}

template <class Entry>
std::vector<Entry> entries_of(const ObjectsRequest& header, const std::string& request) {
  std::vector<Entry> entries(header.num_keys);
  expect(request.size() == sizeof(header) + entries.size() * sizeof(Entry), request.size(),
         " bytes for ", header.num_keys, " keys");
  std::memcpy(entries.data(), request.data() + sizeof(header), entries.size() * sizeof(Entry));
  return entries;
}

template <class T>
iovec part_of(std::vector<T>& rows) {
  return {rows.data(), rows.size() * sizeof(T)};
}

}  // namespace

class ObjectService::Reading final : public Exchange {
 public:
  Reading(ObjectService& service, uint32_t flags, std::vector<ReadEntry> entries)
      : service_(service), pool_(service.pool_), flags_(flags), entries_(std::move(entries)) {}
  ~Reading() override {
    for (const Pin& pin : pins_) pool_->unpin(pin);
  }

  std::vector<iovec> response() override {
    uint64_t left = kMaxRpcPayloadBytes;
    ReadCounts counts;
    rows_.resize(entries_.size());
    std::vector<iovec> parts;
    for (size_t i = entries_.size(); i-- > 0;) {
      ReadRow& row = rows_[i];
      const char* const data = look_up(entries_[i], left, row);
      left -= row.num_bytes;
      counts.num_hits += row.status == ObjectStatus::kDone;
      counts.num_misses += row.status == ObjectStatus::kAbsent;
      counts.num_bytes += row.num_bytes;
      if (row.num_bytes > 0) parts.push_back({const_cast<char*>(data), row.num_bytes});
    }
    parts.push_back(part_of(rows_));
    std::reverse(parts.begin(), parts.end());
    pool_->count(counts);
    if (!service_.options_.is_all) note_read();
    return parts;
  }

 private:
  void note_read() {
    const std::lock_guard lock(service_.mutex_);
    std::vector<Key>& read = service_.done_.read;
    for (size_t i = 0; i < entries_.size() && read.size() < kMaxNoted; ++i) {
      if (rows_[i].status == ObjectStatus::kDone) read.push_back(entries_[i].key);
    }
  }

  // Finds what to send of an object, which is then pinned.
  const char* look_up(const ReadEntry& entry, uint64_t left, ReadRow& row) {
    if (left == 0 && !pins_.empty()) return row.status = ObjectStatus::kBusy, nullptr;
    std::optional<Pin> pin;
    try {
      pin = pool_->pin(entry.key);
    } catch (const PoolDamaged&) {
      throw;
    } catch (const Unavailable&) {  // the limit of this process's reads is reached
      return row.status = ObjectStatus::kBusy, nullptr;
    }
    if (!pin) {
      if (!service_.options_.is_all) row.status = ObjectStatus::kElsewhere;
      return nullptr;
    }
    pins_.push_back(*pin);
    row.object_bytes = pin->num_bytes;
    row.status = judge(entry, *pin, left, row);
    if (row.status != ObjectStatus::kDone) {
      pool_->unpin(*pin);
      pins_.pop_back();
      row.num_bytes = row.checksum = 0;
      return nullptr;
    }
    return pin->data + (entry.offset == kWhole ? 0 : entry.offset);
  }

  ObjectStatus judge(const ReadEntry& entry, const Pin& pin, uint64_t left, ReadRow& row) {
    const bool is_whole = entry.offset == kWhole;
    const uint64_t offset = is_whole ? 0 : entry.offset;
    row.num_bytes = is_whole ? pin.num_bytes : entry.num_bytes;
    if (is_whole ? pin.num_bytes > entry.num_bytes
                 : offset > pin.num_bytes || entry.num_bytes > pin.num_bytes - offset) {
      return ObjectStatus::kDoesNotFit;
    }
    const bool is_first = pins_.size() == 1;
    if (row.num_bytes > left) return is_first ? ObjectStatus::kTooLarge : ObjectStatus::kBusy;
    if ((flags_ & kReadCompare) != 0 && pin.checksum != 0 && compared_.count(pin.data) == 0) {
      if (num_compared_ + pin.num_bytes > kMaxCompared && !is_first) return ObjectStatus::kBusy;
      num_compared_ += pin.num_bytes;
      if (checksum_of(pin.data, pin.num_bytes) != pin.checksum) return ObjectStatus::kDamaged;
      compared_.insert(pin.data);  // it does not move while it is pinned
    }
    row.checksum = is_whole ? pin.checksum : 0;
    if ((flags_ & kReadSums) != 0 && row.checksum == 0) {
      row.checksum = checksum_of(pin.data + offset, row.num_bytes);
    }
    return ObjectStatus::kDone;
  }

  ObjectService& service_;
  const std::shared_ptr<Pool> pool_;
  const uint32_t flags_;
  const std::vector<ReadEntry> entries_;
  std::vector<ReadRow> rows_;
  std::set<const char*> compared_;
  uint64_t num_compared_ = 0;
  std::vector<Pin> pins_;
};

class ObjectService::Storing final : public Exchange {
 public:
  Storing(ObjectService& service, std::vector<WriteEntry> entries, bool publishes)
      : service_(service),
        pool_(service.pool_),
        entries_(std::move(entries)),
        publishes_(publishes),
        sums_(entries_.size()) {
    try {
      for (const WriteEntry& entry : entries_) begin(entry);
      service_.check_takes_puts();  // whoever disables puts then sees what is being written
    } catch (...) {
      abort();
      throw;
    }
  }
  ~Storing() override { abort(); }

  std::vector<iovec> payload() override {
    std::vector<iovec> parts;
    for (size_t i = 0; i < entries_.size(); ++i) {
      if (entries_[i].num_bytes == 0) continue;
      parts.push_back({writings_[i] ? writings_[i]->data : nullptr, entries_[i].num_bytes});
    }
    return parts;
  }

  void arrived(const iovec& part) override {
    if (left_ == 0) begin_sum();
    if (is_summed_) sum_.add(part.iov_base, part.iov_len);
    left_ -= part.iov_len;
    if (left_ > 0) return;
    if (is_summed_) sums_[at_] = sum_.value();
    at_ += 1;
  }

  std::vector<iovec> response() override {
    for (size_t i = 0; i < entries_.size(); ++i) {
      if (writings_[i]) check(i);
    }
    if (publishes_) publish();
    try {
      for (size_t i = entries_.size(); i-- > 0;) {
        if (statuses_[i] == ObjectStatus::kDone) commit(i);
      }
    } catch (...) {
      if (publishes_) service_.note_listed_in_vain();
      throw;
    }
    return {part_of(statuses_)};
  }

 private:
  void begin(const WriteEntry& entry) {
    std::optional<Writing>& writing = writings_.emplace_back();
    ObjectStatus& status = statuses_.emplace_back(ObjectStatus::kTooLarge);
    if (entry.num_bytes > pool_->geometry().capacity_bytes) return;
    Writing begun;
    switch (pool_->begin(entry.key, entry.num_bytes, &begun)) {
      case PutState::kOpen:
        writing = begun;
        break;
      case PutState::kExists:
        status = ObjectStatus::kExists;
        break;
      case PutState::kBeingWritten:
        status = ObjectStatus::kBeingWritten;
        break;
      case PutState::kFull:
        status = ObjectStatus::kFull;
        break;
    }
  }

  // Goes on to the next object that has bytes.
  void begin_sum() {
    while (entries_[at_].num_bytes == 0) at_ += 1;
    left_ = entries_[at_].num_bytes;
    is_summed_ = writings_[at_] && has_sum(at_);
    if (is_summed_) sum_.begin();
  }

  bool has_sum(size_t i) const { return service_.options_.checksums || entries_[i].checksum != 0; }

  // Finds out whether an object has arrived intact. What is not kDone is aborted at the end.
  void check(size_t i) {
    const WriteEntry& entry = entries_[i];
    if (entry.num_bytes == 0 && has_sum(i)) sums_[i] = checksum_of(nullptr, 0);
    const bool is_damaged = entry.checksum != 0 && sums_[i] != entry.checksum;
    statuses_[i] = is_damaged ? ObjectStatus::kDamaged : ObjectStatus::kDone;
  }

  // Before they are committed: so none is visible that the directory refuses, and what the pool
  // evicts is withdrawn after it was listed.
  void publish() {
    std::vector<Key> keys;
    for (size_t i = 0; i < entries_.size(); ++i) {
      if (statuses_[i] == ObjectStatus::kDone) keys.push_back(entries_[i].key);
    }
    if (keys.empty()) return;
    const std::shared_ptr<RedisPublisher> publisher = service_.publisher();
    const bool was_late = publisher && publisher->is_late();  // then it does not ask any more
    const auto listed = publisher ? publisher->publish(keys) : std::vector<bool>(keys.size());
    if (!listed) service_.note_listed_in_vain();
    const bool is_late = !listed && !was_late && publisher->is_late();
    size_t at = 0;
    for (ObjectStatus& status : statuses_) {
      if (status != ObjectStatus::kDone) continue;
      if (!listed) {
        status = is_late ? ObjectStatus::kLate : ObjectStatus::kUnsure;
      } else if (!(*listed)[at++]) {
        status = ObjectStatus::kUnlisted;
      }
    }
  }

  void commit(size_t i) {
    pool_->commit(*writings_[i], service_.options_.checksums ? sums_[i] : 0, Retention::kNormal);
    writings_[i].reset();
  }

  void abort() noexcept {
    std::vector<Writing> left;
    for (std::optional<Writing>& writing : writings_) {
      if (writing) left.push_back(*writing);
      writing.reset();
    }
    pool_->give_up(left);
  }

  ObjectService& service_;
  const std::shared_ptr<Pool> pool_;
  const std::vector<WriteEntry> entries_;
  const bool publishes_;
  std::vector<uint64_t> sums_;  // 0: none
  size_t at_ = 0;               // the object that is arriving
  uint64_t left_ = 0;           // of it
  bool is_summed_ = false;
  Checksum sum_;
  std::vector<std::optional<Writing>> writings_;
  std::vector<ObjectStatus> statuses_;
};

class ObjectService::Removing final : public Exchange {
 public:
  Removing(std::shared_ptr<Pool> pool, std::vector<Key> keys)
      : pool_(std::move(pool)), keys_(std::move(keys)) {}

  std::vector<iovec> response() override {
    for (const Key& key : keys_) {
      statuses_.push_back(pool_->remove(key) ? ObjectStatus::kDone : ObjectStatus::kAbsent);
    }
    return {part_of(statuses_)};
  }

 private:
  const std::shared_ptr<Pool> pool_;
  const std::vector<Key> keys_;
  std::vector<ObjectStatus> statuses_;
};

std::unique_ptr<Exchange> ObjectService::begin(const std::string& request, uint64_t payload_bytes) {
  ObjectsRequest header;
  expect(request.size() >= sizeof(header), request.size(), " bytes");
  std::memcpy(&header, request.data(), sizeof(header));
  expect(header.num_keys >= 1 && header.num_keys <= kMaxRequestKeys, header.num_keys, " keys");
  const bool reads = header.op == ObjectOp::kRead;
  const bool writes = header.op == ObjectOp::kWrite;
  const uint32_t known = reads ? kReadSums | kReadCompare : writes ? kWritePublish : 0;
  expect(header.zero == 0 && (header.flags & ~known) == 0, "flags ", header.flags);
  if (!writes) expect(payload_bytes == 0, payload_bytes, " bytes of payload");
  if (reads) {
    return std::make_unique<Reading>(*this, header.flags, entries_of<ReadEntry>(header, request));
  }
  expect(writes || header.op == ObjectOp::kRemove, "kind ", static_cast<uint32_t>(header.op));
  if (!options_.may_write) throw Refused("its objects may only be read");
  if (!writes) {
    return std::make_unique<Removing>(pool_, entries_of<Key>(header, request));
  }
  check_takes_puts();
  auto entries = entries_of<WriteEntry>(header, request);
  uint64_t left = payload_bytes;
  for (const WriteEntry& entry : entries) {
    expect(entry.num_bytes <= left, "the objects exceed the payload");
    left -= entry.num_bytes;
  }
  expect(left == 0, "the objects fall ", left, " bytes short");
  return std::make_unique<Storing>(*this, std::move(entries), (header.flags & kWritePublish) != 0);
}

void ObjectService::note_listed_in_vain() {
  const std::lock_guard lock(mutex_);
  done_.is_listed_in_vain = true;
}

std::shared_ptr<RedisPublisher> ObjectService::publisher() {
  const std::lock_guard lock(mutex_);
  return publisher_;
}

void ObjectService::check_takes_puts() const {
  if (!takes_puts_)
    throw Refused(
        transfer::ErrorReason("it takes no objects at the moment", transfer::FailureKind::kBusy));
}

ObjectService::Done ObjectService::take_done() {
  const std::lock_guard lock(mutex_);
  return std::exchange(done_, {});
}

}  // namespace mk::served
