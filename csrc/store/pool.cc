#include "store/pool.h"

#include <new>
#include <utility>

#include "common/check.h"

namespace mk::store {

Pool::Pool(std::unique_ptr<PoolMemory> memory, std::unique_ptr<DeviceMemory> gpu,
           const Geometry& geometry)
    : memory_(std::move(memory)),
      gpu_(std::move(gpu)),
      view_(memory_->data(), geometry, gpu_ ? reinterpret_cast<char*>(gpu_->address()) : nullptr,
            memory_->path()),
      index_(view_),
      ledger_(view_),
      removals_(view_),
      changes_(view_) {}

std::shared_ptr<Pool> Pool::create(const std::string& path, const Geometry& geometry,
                                   std::optional<uint32_t> group) {
  std::unique_ptr<DeviceMemory> gpu;
  if (geometry.device >= 0) {
    MK_CHECK(path.empty(), "ObjectPool.create: path must be None on a GPU, got ", path);
    gpu = std::make_unique<DeviceMemory>(geometry.capacity_bytes, geometry.alignment,
                                         geometry.device);
  }
  auto memory = PoolMemory::create(path, View::num_bytes(geometry), group, [&](char* base) {
    const View view(base, geometry);
    Header& header = *view.header;
    header.version = kLayoutVersion;
    header.geometry = geometry;
    header.pid_namespace = pid_namespace();
    header.boot = boot();
    header.mutex.init();
    header.end_of_changes.store(kNumChanges + 1);  // so that none has all of them from 0 on
    for (uint32_t i = 0; i < geometry.num_buckets; ++i) view.buckets[i].head.store(kNone);
    Ledger(view).rebuild();  // without objects
    header.magic.store(kMagic);
  });
  std::shared_ptr<Pool> pool(new Pool(std::move(memory), std::move(gpu), geometry));
  pool->claim();
  return pool;
}

std::shared_ptr<Pool> Pool::open(const std::string& path, const Trust& trust) {
  auto memory = PoolMemory::open(path, trust);
  const auto& header = *reinterpret_cast<const Header*>(memory->data());
  MK_CHECK(memory->num_bytes() >= sizeof(Header) && header.magic.load() == kMagic,
           "ObjectPool.open: path must be the memory of a pool, got ", path);
  if (header.version != kLayoutVersion) {
    throw Unavailable(concat("ObjectPool.open: ", path, " has layout ", header.version,
                             ", and this build has ", kLayoutVersion));
  }
  const Geometry geometry = header.geometry;
  MK_CHECK(geometry.device < 0, "ObjectPool.open: path must be of a pool in host memory, ", path,
           " is on GPU ", geometry.device, ", where its maker alone reads it");
  if (header.boot != boot()) {
    throw Unavailable(
        concat("ObjectPool.open: ", path, " was made before this machine was last ",
               "started, so what it says of its processes no longer holds; delete it"));
  }
  if (header.pid_namespace != pid_namespace()) {
    throw Unavailable(concat("ObjectPool.open: ", path, " is of another pid namespace, in which ",
                             "this process cannot be told from one that has died"));
  }
  if (!geometry.is_possible()) Damage(path).report("its header has sizes that no pool has");
  MK_CHECK(memory->num_bytes() >= View::num_bytes(geometry),
           "ObjectPool.open: path must be the whole memory of a pool, got ", memory->num_bytes(),
           " bytes of ", View::num_bytes(geometry));
  std::shared_ptr<Pool> pool(new Pool(std::move(memory), nullptr, geometry));
  pool->claim();
  return pool;
}

void Pool::claim() {
  {
    const Lock lock(*this);
    ledger_.reap();
    row_ = claim_row(view_);
  }
  if (row_ == kNone) {
    throw Unavailable(concat("ObjectPool.open: all ", geometry().num_rows,
                             " processes that the pool has room for (num_processes) are there"));
  }
  slots_ = std::make_unique<OwnSlots>(view_, row_);
}

RobustMutex& Pool::mutex() const {
  RobustMutex& mutex = view_.header->mutex;
  if (!mutex.is_one()) view_.damage.report("its mutex is none");
  return mutex;
}

// Holders of pins and writings hold the pool too, so nothing of this row is in use. But writings
// that were given up and could not be ended stay with this row until the process dies. In a forked
// child the row is the parent's.
Pool::~Pool() {
  if (row_ == kNone || owner_.forked()) return;
  try {
    if (has_given_up_) const Lock lock(*this);
    clear_row(view_, row_);
  } catch (const std::exception&) {
    // A stopped process still holds the pool.
  }
}

void Pool::page_lock(int device) {
  MK_CHECK(geometry().device < 0, "page_lock: pool must be in host memory, got one on GPU ",
           geometry().device);
  const std::lock_guard<std::mutex> lock(page_locking_);
  if (page_lock_) return;
  page_lock_ = std::make_unique<PageLock>(view_.data, geometry().capacity_bytes, device);
  is_page_locked_ = true;
}

void Pool::contains_each(const Key* keys, size_t count, bool or_written, bool* out) const {
  index_.find_each(keys, count, [&](size_t i, const Found& found) {
    out[i] = found.is_ready() || (or_written && found.entry != kNone && is_coming(found));
    return true;
  });
}

bool Pool::is_coming(const Found& found) const {
  const Entry& entry = view_.entries[found.entry];
  const uint32_t row = entry.row_or_uses.load();
  if (entry.word.load() != found.word) return true;  // stored or ended meanwhile: that is no row
  if (row >= geometry().num_rows) view_.damage.report("an object has a writer without a row");
  return is_alive(view_.rows[row]);
}

void Pool::ids_of(const Key* keys, size_t count, ObjectId* out) const {
  index_.find_each(keys, count, [&](size_t i, const Found& found) {
    out[i] = found.is_ready() ? id_of(found.entry, generation_of(found.word)) : 0;
    return true;
  });
}

size_t Pool::match_prefix(const Key* keys, size_t count) const {
  size_t num_matched = 0;
  index_.find_each(keys, count, [&](size_t, const Found& found) {
    num_matched += found.is_ready();
    return found.is_ready();
  });
  return num_matched;
}

void Pool::touch(Entry& entry) {
  const uint64_t now = view_.header->clock.fetch_add(1, std::memory_order_relaxed) + 1;
  entry.recency.store(now, std::memory_order_relaxed);
  // Of two simultaneous uses one may be lost: that is cheaper than locking the bus.
  const uint16_t uses = entry.row_or_uses.load(std::memory_order_relaxed);
  if (uses < UINT16_MAX) entry.row_or_uses.store(uses + 1, std::memory_order_relaxed);
  if (!entry.visited.load(std::memory_order_relaxed)) {
    entry.visited.store(1, std::memory_order_relaxed);
  }
}

std::optional<Pin> Pool::pin(const Key& key, bool is_use) {
  owner_.check("pin", "pool");
  Found found = index_.find(key);
  if (!found.is_ready()) return std::nullopt;
  const uint32_t slot = slots_->take();
  if (slot == kNone) {
    throw Unavailable(concat("pin: this process holds ", geometry().num_slots,
                             " pins, as many as the pool has room for (num_pins)"));
  }
  // An eviction marks the entry and then looks at the slots; this code does the reverse, so that
  // one of the two sees the other.
  try {
    for (; found.is_ready(); found = index_.find(key)) {
      Entry& entry = view_.entries[found.entry];
      view_.slots[slot].store(slot_of(found.entry, generation_of(found.word)));
      if (entry.word.load() == found.word) {
        const uint64_t num_bytes = entry.num_bytes();
        const char* const data = view_.data_of(entry, num_bytes);
        if (is_use) touch(entry);
        return Pin{found.entry, slot, data, num_bytes, entry.checksum, entry.position()};
      }
    }
  } catch (const PoolDamaged&) {
    slots_->give_back(slot);
    throw;
  }
  slots_->give_back(slot);
  return std::nullopt;
}

void Pool::unpin(const Pin& pin) {
  if (!owner_.forked()) slots_->give_back(pin.slot);
}

void Pool::count(const ReadCounts& reads) {
  owner_.check("read", "pool");
  Row& row = view_.rows[row_];
  if (reads.num_hits > 0) {
    row.num_hits.fetch_add(reads.num_hits, std::memory_order_relaxed);
    row.read_bytes.fetch_add(reads.num_bytes, std::memory_order_relaxed);
  }
  if (reads.num_misses > 0) row.num_misses.fetch_add(reads.num_misses, std::memory_order_relaxed);
}

PoolCounts Pool::counts() const {
  PoolCounts counts{};
  for (uint32_t i = 0; i < geometry().num_rows; ++i) {
    const Row& row = view_.rows[i];
    counts.num_hits += row.num_hits.load(std::memory_order_relaxed);
    counts.num_misses += row.num_misses.load(std::memory_order_relaxed);
    counts.read_bytes += row.read_bytes.load(std::memory_order_relaxed);
  }
  const Header& header = *view_.header;
  counts.num_stored = header.num_stored.load(std::memory_order_relaxed);
  counts.stored_bytes = header.stored_bytes.load(std::memory_order_relaxed);
  counts.num_removed = header.num_removed.load(std::memory_order_relaxed);
  counts.num_evicted = header.num_evicted.load(std::memory_order_relaxed);
  return counts;
}

}  // namespace mk::store
