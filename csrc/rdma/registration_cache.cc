#include "rdma/registration_cache.h"

#include <cerrno>
#include <iterator>
#include <optional>

#include "common/check.h"
#include "rdma/gpu_memory.h"

namespace mk::rdma {

struct RegistrationCache::Entry {
  Span span;
  std::vector<RegionRef> regions;
  std::vector<std::pair<uint64_t, uint64_t>> allocations;  // of GPU memory: address, allocation_id
  size_t num_leases = 0;
  bool registering = true;
  bool listed = true;  // in entries_, so other callers find it
  std::optional<std::list<EntryRef>::iterator> idle;
};

RegistrationCache::Lease::Lease(std::shared_ptr<RegistrationCache> cache, EntryRef entry)
    : cache_(std::move(cache)), entry_(std::move(entry)) {}

Span RegistrationCache::Lease::span() const { return entry_->span; }

const std::vector<RegionRef>& RegistrationCache::Lease::regions() const { return entry_->regions; }

void RegistrationCache::Lease::close() noexcept {
  std::call_once(closed_, [this] { cache_->release(entry_); });
}

RegistrationCache::RegistrationCache(std::vector<std::shared_ptr<Device>> devices,
                                     const CacheOptions& options)
    : devices_(std::move(devices)), options_(options) {
  MK_CHECK(!devices_.empty(), "registration_cache: devices must name at least one, got none");
}

std::shared_ptr<RegistrationCache::Lease> RegistrationCache::acquire(Span span) {
  owner_.check("acquire", "registration cache");
  MK_CHECK(span.num_bytes > 0, "acquire: buffer must hold at least one byte, got none");
  std::vector<EntryRef> dropped;
  EntryRef entry;
  bool found = true;
  {
    std::unique_lock lock(mutex_);
    while (true) {
      MK_CHECK(!closed_, "acquire: the registration cache must be open, but is closed");
      entry = find(span);
      if (!entry) break;
      if (entry->registering) {
        registered_.wait(lock);
      } else if (is_stale(*entry)) {
        drop(entry, &dropped);
        ++stats_.num_invalidations;
      } else {
        break;
      }
    }
    found = entry != nullptr;
    ++(found ? stats_.num_hits : stats_.num_misses);
    if (!found) entry = begin_registration(span, &dropped);
    lease(entry);
  }
  deregister(&dropped);
  const auto result = std::make_shared<Lease>(shared_from_this(), entry);
  if (!found) register_now(entry);
  return result;
}

// The entry that covers the range; null if none does.
RegistrationCache::EntryRef RegistrationCache::find(Span span) {
  const auto after = entries_.upper_bound(span.address);
  if (after == entries_.begin()) return nullptr;
  const EntryRef& candidate = std::prev(after)->second;
  return candidate->span.contains(span) ? candidate : nullptr;
}

// Whether a region has been closed since (as when its device is closed), or the GPU memory was
// freed and its address reused.
bool RegistrationCache::is_stale(const Entry& entry) const {
  for (const RegionRef& region : entry.regions) {
    if (region->is_closed()) return true;
  }
  for (const auto& [address, id] : entry.allocations) {
    if (allocation_id(address) != id) return true;
  }
  return false;
}

// Adds an entry that others wait for. Entries that it contains are no longer needed.
RegistrationCache::EntryRef RegistrationCache::begin_registration(Span span,
                                                                  std::vector<EntryRef>* dropped) {
  auto first = entries_.lower_bound(span.address);
  while (first != entries_.end() && span.contains(first->second->span)) {
    const EntryRef contained = (first++)->second;
    drop(contained, dropped);
  }
  make_room(1, span.num_bytes, dropped);
  const auto entry = std::make_shared<Entry>();
  entry->span = span;
  entries_[span.address] = entry;
  ++stats_.num_regions;
  stats_.num_bytes += span.num_bytes;
  return entry;
}

// Evicts idle entries to make room for that many more.
void RegistrationCache::make_room(uint64_t num_regions, uint64_t num_bytes,
                                  std::vector<EntryRef>* dropped) {
  while (!idle_.empty() && (stats_.num_bytes + num_bytes > options_.max_bytes ||
                            stats_.num_regions + num_regions > options_.max_regions)) {
    drop(EntryRef(idle_.front()), dropped);
    ++stats_.num_evictions;
  }
}

void RegistrationCache::register_now(const EntryRef& entry) {
  std::vector<RegionRef> regions;
  std::vector<std::pair<uint64_t, uint64_t>> allocations;
  const auto try_register = [&] {
    // Queried before registering: if the memory is freed meanwhile, the mismatch is detected later.
    if (const auto gpu = find_gpu_memory(entry->span)) {
      for (const Span& mapping : gpu->mappings) {
        allocations.emplace_back(mapping.address, allocation_id(mapping.address));
      }
    }
    regions = register_memory(devices_, entry->span, options_.registration);
  };
  const auto end = [&](bool made) {
    std::vector<EntryRef> dropped;
    {
      const std::lock_guard lock(mutex_);
      entry->registering = false;
      entry->regions = std::move(regions);
      entry->allocations = std::move(allocations);
      if (!made) drop(entry, &dropped);
      registered_.notify_all();
    }
    deregister(&dropped);
  };
  try {
    try {
      try_register();
    } catch (const SystemError& error) {
      std::vector<EntryRef> dropped;
      {
        const std::lock_guard lock(mutex_);
        if (error.code().value() != ENOMEM || drop_idle(&dropped) == 0) throw;
      }
      deregister(&dropped);
      allocations.clear();
      try_register();
    }
  } catch (...) {
    end(false);
    throw;
  }
  end(true);
}

void RegistrationCache::lease(const EntryRef& entry) {
  if (entry->num_leases++ == 0) ++stats_.num_leased;
  if (!entry->idle) return;
  idle_.erase(*entry->idle);
  entry->idle.reset();
}

void RegistrationCache::release(const EntryRef& entry) noexcept {
  if (owner_.forked()) return;
  std::vector<EntryRef> dropped;
  {
    const std::lock_guard lock(mutex_);
    if (--entry->num_leases > 0) return;
    --stats_.num_leased;
    if (entry->listed) {
      entry->idle = idle_.insert(idle_.end(), entry);
      make_room(0, 0, &dropped);  // while leased, registrations may have exceeded the limits
    } else {
      --stats_.num_regions;
      stats_.num_bytes -= entry->span.num_bytes;
      dropped.push_back(entry);
    }
  }
  deregister(&dropped);
}

// Hides the entry from lookups; if it is not leased, the caller deregisters it without the lock.
void RegistrationCache::drop(const EntryRef& entry, std::vector<EntryRef>* dropped) {
  const EntryRef held = entry;
  if (held->listed) {
    held->listed = false;
    entries_.erase(held->span.address);
  }
  if (held->num_leases > 0) return;
  if (held->idle) idle_.erase(*held->idle);
  held->idle.reset();
  --stats_.num_regions;
  stats_.num_bytes -= held->span.num_bytes;
  dropped->push_back(held);
}

size_t RegistrationCache::drop_idle(std::vector<EntryRef>* dropped) {
  const size_t count = idle_.size();
  while (!idle_.empty()) drop(EntryRef(idle_.front()), dropped);
  stats_.num_evictions += count;
  return count;
}

void RegistrationCache::deregister(std::vector<EntryRef>* dropped) {
  for (const EntryRef& entry : *dropped) {
    for (const RegionRef& region : entry->regions) region->close();
  }
  dropped->clear();
}

size_t RegistrationCache::invalidate(Span span) {
  if (owner_.forked()) return 0;
  std::vector<EntryRef> dropped;
  size_t count = 0;
  {
    const std::lock_guard lock(mutex_);
    auto at = entries_.lower_bound(span.address);
    // Sorted by end: of the entries that begin before, only a run immediately before can overlap.
    while (at != entries_.begin() && std::prev(at)->second->span.overlaps(span)) --at;
    while (at != entries_.end() && at->first < span.end()) {
      const EntryRef entry = (at++)->second;
      drop(entry, &dropped);
      ++count;
    }
    stats_.num_invalidations += count;
  }
  deregister(&dropped);
  return count;
}

CacheStats RegistrationCache::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

void RegistrationCache::close() {
  if (owner_.forked()) return;
  std::vector<EntryRef> dropped;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    while (!entries_.empty()) drop(EntryRef(entries_.begin()->second), &dropped);
    registered_.notify_all();
  }
  deregister(&dropped);
}

}  // namespace mk::rdma
