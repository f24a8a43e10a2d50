// A pool whose memory says anything: the fuzzer changes words of a small one, which is then opened
// and used. Every call ends, by an error or not.
//
// An input is a list of changes, of 8 bytes each, as in seeds.py.
#include "fuzz.h"
#include "store/objects.h"
#include "store/watch.h"

namespace mk::fuzz {
namespace {

using namespace mk::store;
using Key = mk::store::Key;
using Pin = mk::store::Pin;

constexpr uint32_t kNumKeys = 14;

struct Change {
  uint8_t part;  // of the layout
  uint8_t how;
  uint16_t word;
  uint32_t value;
};
static_assert(sizeof(Change) == 8);

const Geometry& geometry() {
  static const Geometry small = Geometry::of(64 * 64, 64, 16, 4, 4);
  return small;
}

Key key(uint32_t i) { return {i, 1}; }

void put(Pool* pool, uint32_t i, uint64_t num_bytes, Retention retention) {
  std::string bytes(num_bytes, 'o');
  put_from(pool, key(i), {{bytes.data(), num_bytes}}, {true, retention});
}

// Memory with all that there can be: objects of all sizes and retentions, gaps, a pin, an object
// that was removed under it, another that is being written.
class Memory {
 public:
  Memory()
      : memory_(View::num_bytes(geometry())),
        path_(concat("/proc/", getpid(), "/fd/", memory_.fd().get())),
        view_(memory_.data(), geometry()) {
    const auto pool = Pool::create("", geometry());
    for (uint32_t i = 0; i < 10; ++i) put(pool.get(), i, 40 * i, static_cast<Retention>(i % 3));
    pool->keep_removals();
    pool->set_quota({1, 1000, 10});
    for (const uint32_t i : {1u, 5u}) pool->remove(key(i));
    const std::optional<Pin> pins[] = {pool->pin(key(2)), pool->pin(key(3))};
    pool->remove(key(3));
    Writing writing;
    pool->begin(key(11), 200, &writing);
    const char* const base = pool->data() - (view_.data - memory_.data());
    index_.assign(base, index_bytes());
    for (const std::optional<Pin>& pin : pins) pool->unpin(*pin);
    pool->abort(writing);
  }

  const std::string& path() const { return path_; }
  size_t index_bytes() const {
    return reinterpret_cast<char*>(view_.changes + kNumChanges) - memory_.data();
  }

  void change(const uint8_t* data, size_t num_bytes) {
    std::memcpy(memory_.data(), index_.data(), index_.size());
    for (; num_bytes >= sizeof(Change); data += sizeof(Change), num_bytes -= sizeof(Change)) {
      Change one;
      std::memcpy(&one, data, sizeof(one));
      apply(one);
    }
    keep_mutex();
  }

 private:
  void apply(const Change& one) {
    char* const parts[] = {
        memory_.data(),        bytes(view_.rows),           bytes(view_.slots),
        bytes(view_.buckets),  bytes(view_.entries),        bytes(view_.links),
        bytes(view_.heap),     bytes(view_.heap_positions), bytes(view_.spans),
        bytes(view_.removals), bytes(view_.changes),        memory_.data() + index_.size()};
    const size_t part = one.part % (std::size(parts) - 1);
    char* const at = parts[part] + 4 * (one.word % ((parts[part + 1] - parts[part]) / 4));
    uint32_t value = one.value;
    if (one.how % 4 == 1) value += word_at(at);
    if (one.how % 4 == 2) value = UINT32_MAX - value;
    std::memcpy(at, &value, one.how % 4 == 3 ? 1 : sizeof(value));
  }

  // A mutex whose owner never was makes each call wait for 10 s. Its kind may change.
  void keep_mutex() {
    const size_t at = reinterpret_cast<char*>(&view_.header->mutex) - memory_.data();
    constexpr size_t kKind = 16, kKindEnd = 20;  // as in glibc
    std::memcpy(memory_.data() + at, index_.data() + at, kKind);
    std::memcpy(memory_.data() + at + kKindEnd, index_.data() + at + kKindEnd,
                sizeof(pthread_mutex_t) - kKindEnd);
  }

  static uint32_t word_at(const char* at) {
    uint32_t word;
    std::memcpy(&word, at, sizeof(word));
    return word;
  }
  template <class T>
  static char* bytes(T* array) {
    return reinterpret_cast<char*>(array);
  }

  const SharedMemory memory_;
  const std::string path_;
  const View view_;
  std::string index_;
};

template <class Call>
void attempt(const Call& call) {
  try {
    call();
  } catch (const Unavailable&) {  // damaged
  } catch (const InvalidArgument&) {
  } catch (const SystemError&) {
  }
}

void use(const std::shared_ptr<Pool>& pool) {
  Watch watch(pool);
  std::vector<Key> keys;
  for (uint32_t i = 0; i < kNumKeys; ++i) keys.push_back(key(i));
  bool found[kNumKeys];
  ObjectId ids[kNumKeys] = {};
  attempt([&] { pool->contains_each(keys.data(), kNumKeys, true, found); });
  attempt([&] { pool->match_prefix(keys.data(), kNumKeys); });
  attempt([&] { pool->ids_of(keys.data(), kNumKeys, ids); });
  attempt([&] { watch.look(); });
  for (const Key& each : keys) {
    attempt([&] {
      char bytes[400];
      uint64_t num_bytes = 0;
      ReadCounts counts;
      get_into(pool.get(), each, std::nullopt, {{bytes, sizeof(bytes)}}, true, &num_bytes, &counts);
      pool->count(counts);
    });
  }
  attempt([&] { pool->stats(); });
  attempt([&] { pool->scan(); });
  attempt([&] { pool->quotas(); });
  attempt([&] { pool->order_uses(keys.data(), kNumKeys); });
  attempt([&] { pool->retain(key(4), Retention::kHard); });
  attempt([&] { pool->retain(key(2), Retention::kSoft); });
  attempt([&] { pool->victims(300, Policy::kLru); });
  attempt([&] { pool->victims(300, Policy::kSieve); });
  attempt([&] { put(pool.get(), 12, 100, Retention::kNormal); });
  attempt([&] { put(pool.get(), 11, 20, Retention::kSoft); });
  attempt([&] { pool->evict(200, Policy::kSieve); });
  attempt([&] { pool->remove(key(6)); });
  attempt([&] { pool->remove_exactly(ids[7]); });
  attempt([&] { pool->evict_keys(keys.data(), kNumKeys / 2, ids); });
  attempt([&] {
    std::vector<Key> removed;
    uint64_t end;
    pool->removals().read(pool->removals().first(), &removed, &end);
  });
  attempt([&] {
    const std::optional<Pin> pin = pool->pin(key(9));
    if (!pin) return;
    checksum_of({pool->piece(pin->data, pin->num_bytes)});
    pool->unpin(*pin);
  });
  attempt([&] { pool->evict(UINT64_MAX, Policy::kLru); });
  attempt([&] { put(pool.get(), 13, 4096, Retention::kNormal); });
  attempt([&] { pool->reap(); });
  attempt([&] { watch.look(); });
  attempt([&] { pool->set_quota({2, 5, 5}); });
  attempt([&] { pool->counts(); });
}

}  // namespace
}  // namespace mk::fuzz

using namespace mk::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  static Memory& memory = *new Memory;
  memory.change(data, num_bytes);
  std::shared_ptr<Pool> pool;
  attempt([&] { pool = Pool::open(memory.path()); });
  if (!pool) return 0;
  // Between the index and the objects there is a hole, which is no one's.
  const Geometry& geometry = pool->geometry();
  const uint64_t data_begin = View::num_bytes(geometry) - geometry.capacity_bytes;
  const View view(pool->data() - data_begin, geometry);
  char* const hole = reinterpret_cast<char*>(view.changes + kNumChanges);
  __asan_poison_memory_region(hole, pool->data() - hole);
  use(pool);
  __asan_unpoison_memory_region(hole, pool->data() - hole);
  return 0;
}
