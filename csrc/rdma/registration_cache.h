// RegistrationCache: keeps registrations after their use, because registering takes longer than
// most transfers.
//
//   RegistrationCache cache({device}, {});
//   auto lease = cache.acquire({address, num_bytes});   // registers, or finds a covering one
//   lease->regions()[0] ...                             // valid until the lease is closed
//
// Layer: rdma. Thread-safe.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "common/owner.h"
#include "rdma/memory_region.h"
#include "rdma/span.h"
#include "rdma/verbs.h"

namespace mk::rdma {

struct CacheOptions {
  RegisterOptions registration;            // for all its regions
  uint64_t max_bytes = uint64_t{1} << 40;  // kept, unless more is leased
  uint64_t max_regions = 4096;             // likewise
};

struct CacheStats {
  uint64_t num_hits = 0, num_misses = 0, num_evictions = 0, num_invalidations = 0;
  uint64_t num_regions = 0, num_leased = 0, num_bytes = 0;  // registered now
};

class RegistrationCache : public std::enable_shared_from_this<RegistrationCache> {
  struct Entry;
  using EntryRef = std::shared_ptr<Entry>;

 public:
  // A range in use: it stays registered until the lease is closed.
  class Lease {
   public:
    Lease(std::shared_ptr<RegistrationCache> cache, EntryRef entry);
    Lease(const Lease&) = delete;
    ~Lease() { close(); }

    Span span() const;                              // the registered range, or more
    const std::vector<RegionRef>& regions() const;  // one per device, in the cache's order
    void close() noexcept;                          // idempotent

   private:
    const std::shared_ptr<RegistrationCache> cache_;
    const EntryRef entry_;
    std::once_flag closed_;
  };

  RegistrationCache(std::vector<std::shared_ptr<Device>> devices, const CacheOptions& options);
  ~RegistrationCache() { close(); }

  // Throws as register_memory. If memory cannot be locked, idle registrations are evicted first.
  std::shared_ptr<Lease> acquire(Span span);
  // Call it when the memory is freed, or before: no overlapping registration is found any more.
  // Leased ones stay registered for their lease. Returns the number of registrations concerned.
  size_t invalidate(Span span);
  CacheStats stats() const;
  // Fails later calls of acquire(); leased registrations end with their leases.
  void close();

 private:
  EntryRef find(Span span);
  bool is_stale(const Entry& entry) const;
  EntryRef begin_registration(Span span, std::vector<EntryRef>* dropped);
  void make_room(uint64_t num_regions, uint64_t num_bytes, std::vector<EntryRef>* dropped);
  void register_now(const EntryRef& entry);
  void lease(const EntryRef& entry);
  void release(const EntryRef& entry) noexcept;
  void drop(const EntryRef& entry, std::vector<EntryRef>* dropped);
  size_t drop_idle(std::vector<EntryRef>* dropped);
  static void deregister(std::vector<EntryRef>* dropped);

  const std::vector<std::shared_ptr<Device>> devices_;
  const CacheOptions options_;
  const Owner owner_;

  mutable std::mutex mutex_;
  std::condition_variable registered_;
  bool closed_ = false;
  // By start address. None contains another, so they are sorted by end, too, and only the last one
  // that begins at or before an address can cover a range from there.
  std::map<uint64_t, EntryRef> entries_;
  std::list<EntryRef> idle_;  // least recently used first
  CacheStats stats_;
};

}  // namespace mk::rdma
