// Layout: what lies where in the memory of a pool. docs/store.md describes it; kLayoutVersion
// counts its changes.
//
//   const Geometry geometry = Geometry::of(options);   // refuses what cannot be
//   View view(memory.data(), geometry);
//   view.entries[i].word.load();
//
// Nothing in it is a pointer, for each process maps it elsewhere. Layer: store.
#pragma once

#include <atomic>
#include <cstdint>

#include "store/allocator.h"
#include "store/robust_mutex.h"

namespace mk::store {

constexpr uint64_t kMagic = 0x314c4f4f504b4d;  // "MKPOOL1"
constexpr uint32_t kLayoutVersion = 3;

// The name of an object: what it holds (a prefix hash), and of whom (tenant, model, layout, rank).
struct Key {
  uint64_t hash;
  uint64_t scope;
};

enum class State : uint32_t { kFree, kWriting, kReady, kDoomed };

// How long an object shall stay: kSoft outlasts all that is kNormal, kHard is never evicted.
enum class Retention : uint8_t { kNormal, kSoft, kHard };

// An entry's generation and its state in one word, so that both change at once.
inline uint64_t word_of(uint64_t generation, State state) {
  return generation << 32 | static_cast<uint32_t>(state);
}
inline State state_of(uint64_t word) { return static_cast<State>(static_cast<uint32_t>(word)); }
inline uint64_t generation_of(uint64_t word) { return word >> 32; }
inline bool is_live(uint64_t word) {
  return state_of(word) == State::kWriting || state_of(word) == State::kReady;
}

// An object. `word` is written last: what it says is true of all the rest.
struct alignas(64) Entry {
  std::atomic<uint64_t> word;
  std::atomic<uint64_t> hash;
  std::atomic<uint64_t> scope;
  uint64_t num_bytes : 48;
  uint64_t position : 16;         // in its prompt, in objects, as who stored it says
  uint64_t checksum;              // 0: none
  std::atomic<uint64_t> recency;  // the pool's clock at its last use
  std::atomic<uint32_t> next;     // in its bucket
  uint32_t span;
  uint32_t first_unit;
  std::atomic<uint16_t> row_or_uses;  // kWriting: of who writes it; kReady: how often it was used
  std::atomic<uint8_t> visited;
  Retention retention;
};
static_assert(sizeof(Entry) == 64);

constexpr uint64_t kMaxCapacity = uint64_t{1} << 48;  // num_bytes of an entry

struct Bucket {
  std::atomic<uint32_t> head;
  std::atomic<uint32_t> num_removed;  // who misses a key looks whether this has changed meanwhile
};

// A process that uses the pool. Its slots say what it reads: (entry + 1) << 32 | generation.
struct alignas(64) Row {
  std::atomic<uint64_t> pid;  // 0: nobody's
  std::atomic<uint64_t> start_time;
  std::atomic<uint32_t> num_slots;  // from here on none has been used
};
using Slot = std::atomic<uint64_t>;

inline uint64_t slot_of(uint32_t entry, uint64_t generation) {
  return (uint64_t{entry} + 1) << 32 | static_cast<uint32_t>(generation);
}

struct HeapItem {
  uint64_t stamp;
  uint32_t entry;
};

// In the queue of SIEVE; of entries that are free or doomed, `older` is the next in their list.
struct Link {
  uint32_t newer;
  uint32_t older;
};

struct Geometry {
  uint64_t capacity_bytes;  // of objects
  uint32_t alignment;
  uint32_t num_units;
  uint32_t num_entries;
  uint32_t num_buckets;  // a power of two
  uint32_t num_rows;
  uint32_t num_slots;   // a row
  int32_t device = -1;  // the GPU, in whose memory the objects are; -1: behind all else

  // Throws InvalidArgument.
  static Geometry of(uint64_t capacity_bytes, uint64_t alignment, uint64_t num_objects,
                     uint64_t num_processes, uint64_t num_pins);
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
  uint64_t num_rebuilds;  // the one that made the pool is the first
  alignas(64) std::atomic<uint64_t> clock;
  alignas(64) RobustMutex mutex;
  // What follows belongs to who holds the mutex, and is made anew from the entries if he dies.
  uint32_t free_entries;  // lists
  uint32_t doomed_entries;
  uint32_t num_writing;
  uint32_t num_ready;
  uint32_t num_doomed;
  uint64_t doomed_units;
  uint32_t heap_size;
  uint32_t newest;  // of the queue of SIEVE
  uint32_t oldest;
  uint32_t hand;
  AllocatorState allocator;
};

struct View {
  // `gpu_data`: where the objects are, if that is on a GPU.
  View(char* base, const Geometry& geometry, char* gpu_data = nullptr);
  static uint64_t num_bytes(const Geometry& geometry);

  char* data_of(const Entry& entry) const {
    return data + uint64_t{entry.first_unit} * header->geometry.alignment;
  }

  Header* header;
  Row* rows;
  Slot* slots;
  Bucket* buckets;
  Entry* entries;
  Link* links;
  HeapItem* heap;
  uint32_t* heap_positions;
  Span* spans;
  char* data;
  uint64_t end;  // of all that, in bytes
};

}  // namespace mk::store
