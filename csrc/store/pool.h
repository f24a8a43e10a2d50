// Pool: objects in a host's memory, shared by all its processes. Each process maps the memory and
// finds, pins, reads and writes objects by itself; there is no server. Alternatively, objects in
// the memory of a GPU, of one process.
//
//   auto pool = Pool::create("/dev/shm/kv", geometry);  // others: Pool::open("/dev/shm/kv")
//   Writing writing;
//   if (pool->begin(key, num_bytes, &writing) == PutState::kOpen) {
//     fill(writing.data);
//     pool->commit(writing, checksum, Retention::kNormal);  // now visible to others
//   }
//   if (const auto pin = pool->pin(key)) {
//     use(pin->data, pin->num_bytes);  // stays, whatever other processes do
//     pool->unpin(*pin);
//   }
//
// Lookups and pins take no lock. Changes to the pool hold one mutex; docs/store/store.md says what
// remains when a process dies at any moment. Layer: store. Thread-safe. Python face:
// mooncake_kernels/pool.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/device_memory.h"
#include "common/owner.h"
#include "common/page_lock.h"
#include "store/changes.h"
#include "store/index.h"
#include "store/layout.h"
#include "store/ledger.h"
#include "store/memory.h"
#include "store/removals.h"
#include "store/rows.h"

namespace mk::store {

// The location of bytes: on the host, or on a GPU, which copies them after all that is in a stream
// (a driver handle).
struct Piece {
  char* data;
  uint64_t num_bytes;
  int device = -1;  // the host
  uint64_t stream = 0;
};

// Identifies an object among all that were ever in its pool, up to 2^32 uses of its entry. Never 0.
using ObjectId = uint64_t;
inline ObjectId id_of(uint32_t entry, uint64_t generation) {
  return (generation << 32 | entry) + 1;
}

// An object that this process writes.
struct Writing {
  uint32_t entry;
  uint64_t generation;
  char* data;
  uint64_t num_bytes;
  uint64_t removals_end;  // when it began, see Removals
  ObjectId id() const { return id_of(entry, generation); }
};

enum class PutState { kOpen, kExists, kBeingWritten, kFull };

// An object that this process reads.
struct Pin {
  uint32_t entry;
  uint32_t slot;
  const char* data;
  uint64_t num_bytes;
  uint64_t checksum;  // 0: none
  uint16_t position;  // in its prompt
};

enum class Policy { kLru, kSieve };

struct Evicted {
  std::vector<Key> keys;
  uint64_t num_bytes = 0;  // that can be allocated again
};

struct ObjectInfo {
  Key key;
  uint64_t num_bytes;
  uint64_t recency;
  uint16_t uses;      // including the store; saturates
  uint16_t position;  // in its prompt
  Retention retention;
  ObjectId id;
};

struct QuotaInfo {
  uint64_t scope, num_bytes, num_objects;  // 0: no limit
};

struct PoolStats {
  uint64_t capacity_bytes, free_bytes, largest_free_bytes, num_free_spans;
  uint64_t max_objects, num_ready, num_writing, num_doomed;
  uint64_t doomed_bytes;  // removed, but still being read
  uint64_t num_pins, num_processes;
  uint64_t num_repairs;  // how often a process died while it changed the pool
};

// What came of reads.
struct ReadCounts {
  uint64_t num_hits = 0, num_misses = 0, num_bytes = 0;
};

// Sums since the pool was made, of all its processes, dead or alive.
struct PoolCounts {
  uint64_t num_hits, num_misses, num_stored, num_removed, num_evicted, read_bytes, stored_bytes;
};

class Pool {
 public:
  // An empty path: nameless memory, the only kind for a pool on a GPU. Throws SystemError;
  // Unavailable and CudaError, from the driver.
  static std::shared_ptr<Pool> create(const std::string& path, const Geometry& geometry,
                                      std::optional<uint32_t> group = std::nullopt);
  // Throws SystemError, InvalidArgument (it is no pool, or not that of those who are trusted),
  // Unavailable (another version, another pid namespace, no row left), PoolDamaged. So does every
  // call on what another process of those has damaged since; none crashes, or never ends.
  static std::shared_ptr<Pool> open(const std::string& path, const Trust& trust = {});
  Pool(const Pool&) = delete;
  ~Pool();

  const std::string& path() const { return memory_->path(); }
  // A new descriptor of its memory, with locks of its own. Throws SystemError.
  Fd reopen() const { return memory_->reopen(); }
  const Geometry& geometry() const { return view_.geometry; }
  char* data() const { return view_.data; }
  int device() const { return geometry().device; }
  // Bytes of an object, as an argument of copies.
  Piece piece(const char* data, uint64_t num_bytes) const {
    return {const_cast<char*>(data), num_bytes, device(), gpu_ ? gpu_->stream() : 0};
  }

  // Page-locks the memory of all objects, for this process; see common/page_lock.h. Idempotent.
  void page_lock(int device);
  bool is_page_locked() const { return is_page_locked_; }

  bool contains(const Key& key) const { return index_.find(key).is_ready(); }
  // `or_written`: those that a living process is writing count, too.
  void contains_each(const Key* keys, size_t count, bool or_written, bool* out) const;
  size_t match_prefix(const Key* keys, size_t count) const;  // length of the prefix that is present
  void ids_of(const Key* keys, size_t count, ObjectId* out) const;  // 0: not present

  // Space for an object, invisible until commit(). kFull: no room, or no entry.
  PutState begin(const Key& key, uint64_t num_bytes, Writing* writing);
  void commit(const Writing& writing, uint64_t checksum, Retention retention,
              uint16_t position = 0);
  // For a copy of what exists elsewhere: aborts, and returns false, if its key was removed since
  // begin(), by whichever process; requires keep_removals().
  bool commit_unless_removed(const Writing& writing, uint64_t checksum, Retention retention,
                             uint16_t position = 0);
  void abort(const Writing& writing);
  // abort() for a caller that cannot retry: waits 100 ms at most; if a stopped process holds the
  // pool, the next change that this process makes completes it. No effect in a forked child.
  void give_up(const std::vector<Writing>& writings) noexcept;

  // Counts as a use, unless `is_use` is false. Empty if there is no such object.
  std::optional<Pin> pin(const Key& key, bool is_use = true);
  void unpin(const Pin& pin);

  // Returns whether it was present. Noted, also if it was not, for who keeps removals; unless that
  // is the caller itself.
  bool remove(const Key& key, bool is_noted = true);
  void remove_each(const Key* keys, size_t count, bool* out, bool is_noted = true);  // all at once
  bool remove_exactly(ObjectId id);  // unless the key now has another object; not noted
  bool retain(const Key& key, Retention retention);
  // Exchanges the objects' times of last use, so that the first becomes the oldest of them.
  void order_uses(const Key* keys, size_t count);

  // Frees at least `num_bytes` if possible; never evicts what is retained kHard or pinned by a
  // reader.
  Evicted evict(uint64_t num_bytes, Policy policy);
  // What evict() would take, in that order; it takes nothing. SIEVE's hand moves on, as if it had.
  std::vector<ObjectInfo> victims(uint64_t num_bytes, Policy policy);
  // `ids`: of the objects; others that the keys have by now stay. Null: whatever the keys have.
  Evicted evict_keys(const Key* keys, size_t count, const ObjectId* ids = nullptr);

  // What remove() notes from now on; see Removals.
  void keep_removals();
  void note_all_removed();
  Removals& removals() { return removals_; }
  const Removals& removals() const { return removals_; }

  // Remembers what a scope may take, see Quota; no limits: nothing. False: there is no row left.
  bool set_quota(const QuotaInfo& quota);
  std::vector<QuotaInfo> quotas();

  // Reclaims what dead processes were holding; returns how many there were.
  uint32_t reap();
  std::vector<ObjectInfo> scan();  // all ready objects
  PoolStats stats(std::chrono::milliseconds limit = RobustMutex::kLimit);

  // Adds to the counts what pins were for, once for many: pin() does not know what comes of it.
  void count(const ReadCounts& reads);
  PoolCounts counts() const;  // takes no lock

 private:
  friend class Watch;
  class Lock;

  Pool(std::unique_ptr<PoolMemory> memory, std::unique_ptr<DeviceMemory> gpu,
       const Geometry& geometry);
  void claim();
  RobustMutex& mutex() const;
  void touch(Entry& entry);
  ObjectInfo info_of(uint32_t at) const;     // of a ready entry; requires the mutex
  bool is_coming(const Found& found) const;  // of what is being written: its writer lives
  Entry& checked(const char* op, const Writing& writing) const;
  void end_given_up();  // requires the mutex

  const std::unique_ptr<PoolMemory> memory_;
  const std::unique_ptr<DeviceMemory> gpu_;  // if the objects are on a GPU
  const View view_;
  const Index index_;
  Ledger ledger_;
  Removals removals_;
  const Changes changes_;
  const Owner owner_;
  std::unique_ptr<OwnSlots> slots_;
  uint32_t row_ = kNone;
  std::mutex giving_up_;
  std::vector<Writing> given_up_;
  std::atomic<bool> has_given_up_{false};
  std::mutex page_locking_;
  std::unique_ptr<PageLock> page_lock_;
  std::atomic<bool> is_page_locked_{false};
};

// Holds the pool's mutex.
class Pool::Lock {
 public:
  explicit Lock(Pool& pool, std::chrono::milliseconds limit = RobustMutex::kLimit)
      : lock_(pool.mutex(), [&pool] { pool.ledger_.rebuild(); }, limit) {
    if (pool.has_given_up_) pool.end_given_up();
  }

 private:
  RobustMutex::Lock lock_;
};

}  // namespace mk::store
