// Layout: the memory layout of a pool. docs/internals/pool.md describes it; kLayoutVersion changes
// with it.
//
//   const Geometry geometry = Geometry::of(options);   // refuses what is impossible
//   View view(memory.data(), geometry);
//   view.entries[i].word.load();
//
// It contains no pointers, as each process maps it at a different address. Layer: store.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "store/allocator.h"
#include "store/damage.h"
#include "store/robust_mutex.h"

namespace mk::store {

constexpr uint64_t kMagic = 0x314c4f4f504b4d;  // "MKPOOL1"
constexpr uint32_t kLayoutVersion = 7;

// The name of an object: its content (a prefix hash) and its scope (tenant, model, layout, rank).
struct Key {
  uint64_t hash;
  uint64_t scope;
};

enum class State : uint32_t { kFree, kWriting, kReady, kDoomed };

// Eviction priority: kSoft outlasts all that is kNormal; kHard is never evicted.
enum class Retention : uint8_t { kNormal, kSoft, kHard };

// An entry's generation and state in one word, so that both change atomically.
inline uint64_t word_of(uint64_t generation, State state) {
  return generation << 32 | static_cast<uint32_t>(state);
}
inline State state_of(uint64_t word) { return static_cast<State>(static_cast<uint32_t>(word)); }
inline uint64_t generation_of(uint64_t word) { return word >> 32; }
inline bool is_live(uint64_t word) {
  return state_of(word) == State::kWriting || state_of(word) == State::kReady;
}

constexpr uint64_t kMaxCapacity = uint64_t{1} << 48;  // num_bytes of an entry

// An object. `word` is written last: what it says holds for all other fields.
struct alignas(64) Entry {
  std::atomic<uint64_t> word;
  std::atomic<uint64_t> hash;
  std::atomic<uint64_t> scope;
  std::atomic<uint64_t> extent;   // size and position, see extent_of
  uint64_t checksum;              // 0: none
  std::atomic<uint64_t> recency;  // the pool's clock at its last use
  std::atomic<uint32_t> next;     // in its bucket's chain
  std::atomic<uint32_t> span;
  std::atomic<uint32_t> first_unit;
  std::atomic<uint16_t> row_or_uses;  // kWriting: the writer's row; kReady: number of uses
  std::atomic<uint8_t> visited;
  Retention retention;

  // `position`: in its prompt, in objects, as the writer states it.
  static uint64_t extent_of(uint64_t num_bytes, uint16_t position) {
    return uint64_t{position} << 48 | num_bytes;
  }
  uint64_t num_bytes() const { return extent.load(std::memory_order_relaxed) & (kMaxCapacity - 1); }
  uint16_t position() const {
    return static_cast<uint16_t>(extent.load(std::memory_order_relaxed) >> 48);
  }
};
static_assert(sizeof(Entry) == 64);

struct Bucket {
  std::atomic<uint32_t> head;
  std::atomic<uint32_t> num_removed;  // a reader that misses a key checks whether it has changed
};

// A process that uses the pool. Its slots hold what it reads: (entry + 1) << 32 | generation.
struct alignas(64) Row {
  std::atomic<uint64_t> pid;  // 0: the row is unused
  std::atomic<uint64_t> start_time;
  std::atomic<uint32_t> num_slots;  // no slot from here on has been used
  // Of its reads, and those of the row's earlier owners. Only its threads add to it: processes that
  // read do not wait for each other's cache line.
  std::atomic<uint64_t> num_hits, num_misses, read_bytes;
};
static_assert(sizeof(Row) == 64);
using Slot = std::atomic<uint64_t>;

inline uint64_t slot_of(uint32_t entry, uint64_t generation) {
  return (uint64_t{entry} + 1) << 32 | static_cast<uint32_t>(generation);
}

struct HeapItem {
  uint64_t stamp;
  uint32_t entry;
};

// In SIEVE's queue; for entries that are free or doomed, `older` is the next in their list.
struct Link {
  uint32_t newer;
  uint32_t older;
};

// The key of an object that was removed, see Removals.
struct Removal {
  std::atomic<uint64_t> hash;
  std::atomic<uint64_t> scope;
};
constexpr uint32_t kNumRemovals = 1 << 14;

constexpr uint32_t kNumChanges = 1 << 16;  // see Changes

// What the objects of a scope may take of the pool, for who keeps to it; the pool does not. No
// limit: 0; if both are 0, the row is free.
struct Quota {
  std::atomic<uint64_t> scope, num_bytes, num_objects;
};
constexpr uint32_t kNumQuotas = 64;

struct Geometry {
  uint64_t capacity_bytes;  // of objects
  uint32_t alignment;
  uint32_t num_units;
  uint32_t num_entries;
  uint32_t num_buckets;  // a power of two
  uint32_t num_rows;
  uint32_t num_slots;   // per row
  int32_t device = -1;  // the GPU whose memory holds the objects; -1: they follow the metadata

  // Throws InvalidArgument.
  static Geometry of(uint64_t capacity_bytes, uint64_t alignment, uint64_t num_objects,
                     uint64_t num_processes, uint64_t num_pins);
  // Whether of() could have made it, but for fewer buckets. One that is not makes no View.
  bool is_possible() const;
  uint32_t num_spans() const { return 2 * num_entries + 1; }
  uint32_t units(uint64_t num_bytes) const {
    return num_bytes == 0 ? 1 : static_cast<uint32_t>((num_bytes + alignment - 1) / alignment);
  }
};

struct Header {
  std::atomic<uint64_t> magic;  // written last
  uint32_t version;
  Geometry geometry;
  uint64_t pid_namespace;
  uint64_t boot;
  uint64_t num_rebuilds;                  // including the one that made the pool
  std::atomic<uint32_t> keeps_removals;   // whether some process wants to know of them
  std::atomic<uint64_t> first_removal;    // that this process has not dealt with yet
  std::atomic<uint64_t> end_of_removals;  // the number of the next one
  std::atomic<uint64_t> end_of_changes;   // the same, see Changes
  Quota quotas[kNumQuotas];
  alignas(64) std::atomic<uint64_t> clock;
  alignas(64) RobustMutex mutex;
  // Sums since the pool was made: the holder of the mutex adds to them, and nothing sets them back.
  std::atomic<uint64_t> num_stored, stored_bytes, num_removed, num_evicted;
  // The rest belongs to the holder of the mutex, and is rebuilt from the entries if the holder
  // dies.
  uint32_t free_entries;  // heads of lists
  uint32_t doomed_entries;
  uint32_t num_writing;
  uint32_t num_ready;
  uint32_t num_doomed;
  uint64_t doomed_units;
  uint32_t heap_size;
  uint32_t newest;  // of SIEVE's queue
  uint32_t oldest;
  uint32_t hand;
  AllocatorState allocator;
};

// What is read from this memory may be anything, if it is damaged. So an index is compared with the
// size of what it leads into before it is used, and a loop ends that follows more links than there
// are. The sizes are those of `geometry`, a copy that was checked once, and not the header's.
struct View {
  // `gpu_data`: the address of the objects, if they are on a GPU. `path`: for messages.
  View(char* base, const Geometry& geometry, char* gpu_data = nullptr,
       const std::string& path = "");
  static uint64_t num_bytes(const Geometry& geometry);

  // Of an entry with that many bytes.
  char* data_of(const Entry& entry, uint64_t num_bytes) const {
    const uint64_t offset =
        uint64_t{entry.first_unit.load(std::memory_order_relaxed)} * geometry.alignment;
    if (num_bytes > geometry.capacity_bytes || offset > geometry.capacity_bytes - num_bytes) {
      damage.report("an object reaches out of it");
    }
    return data + offset;
  }
  // Of the process that writes it.
  uint32_t row_of(const Entry& entry) const {
    const uint32_t row = entry.row_or_uses.load();
    if (row >= geometry.num_rows) damage.report("an object has a writer that it has no row for");
    return row;
  }
  uint32_t units_of(const Entry& entry) const {
    const uint64_t num_bytes = entry.num_bytes();
    if (num_bytes > geometry.capacity_bytes) damage.report("an object is larger than it");
    return geometry.units(num_bytes);
  }

  const Geometry geometry;
  Header* header;
  Row* rows;
  Slot* slots;
  Bucket* buckets;
  Entry* entries;
  Link* links;
  HeapItem* heap;
  uint32_t* heap_positions;
  Span* spans;
  Removal* removals;
  uint32_t* changes;
  char* data;
  uint64_t end;  // the total size, in bytes
  Damage damage;
};

}  // namespace mk::store
