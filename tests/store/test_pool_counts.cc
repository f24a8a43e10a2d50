// What a pool counts: of all processes, also of those that are killed; test_pool_counts.py has
// reads.
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>

#include "pool_checks.h"

namespace {

using namespace mk::store;

constexpr Key kHere{1, 1}, kAbsent{2, 1};
constexpr uint64_t kBytes = 100;

bool operator==(const PoolCounts& a, const PoolCounts& b) {
  return a.num_hits == b.num_hits && a.num_misses == b.num_misses && a.num_stored == b.num_stored &&
         a.num_removed == b.num_removed && a.num_evicted == b.num_evicted &&
         a.read_bytes == b.read_bytes && a.stored_bytes == b.stored_bytes;
}

void read(Pool* pool, const Key& key) {
  char buffer[kBytes];
  uint64_t object_bytes = 0;
  ReadCounts counts;
  get_into(pool, key, {}, {{buffer, kBytes}}, true, &object_bytes, &counts);
  pool->count(counts);
}

void changes() {
  const auto pool = Pool::create("", Geometry::of(16 * 128, 128, 8, 3, 4));
  Pool* const p = pool.get();
  p->keep_removals();
  Writing writing;
  p->begin({8, 1}, kBytes, &writing);
  p->abort(writing);
  p->begin({8, 1}, kBytes, &writing);
  EXPECT(!p->remove({8, 1}) && !p->commit_unless_removed(writing, 0, Retention::kNormal));
  EXPECT(p->counts() == PoolCounts{});
  for (uint64_t i = 0; i < 6; ++i) put(p, {i, 1}, kBytes);
  const Key some[] = {{0, 1}, {7, 1}, {1, 1}};
  bool were_there[3];
  p->remove_each(some, 3, were_there);
  ObjectId id = 0;
  p->ids_of(&kAbsent, 1, &id);
  EXPECT(p->remove_exactly(id) && !p->remove_exactly(id));
  EXPECT((p->counts() == PoolCounts{0, 0, 6, 3, 0, 0, 6 * kBytes}));
  const Key evicted{3, 1};
  p->evict_keys(&evicted, 1);
  p->evict_keys(&evicted, 1);
  p->evict(128, Policy::kSieve);
  p->evict(UINT64_MAX, Policy::kLru);
  EXPECT((p->counts() == PoolCounts{0, 0, 6, 3, 3, 0, 6 * kBytes}));
}

pid_t started(const std::string& path, const std::function<void(Pool*)>& life) {
  const pid_t child = fork();
  if (child != 0) return child;
  {
    const auto pool = Pool::open(path);
    life(pool.get());
  }
  _exit(0);
}

void several_processes() {
  constexpr uint64_t kProcesses = 3, kThreads = 2, kRounds = 2000;
  const auto pool = Pool::create("", Geometry::of(16 * 128, 128, 8, kProcesses + 1, 8));
  put(pool.get(), kHere, kBytes);
  for (int turn = 0; turn < 2; ++turn) {  // of which the second one goes on in the rows
    std::vector<pid_t> children;
    for (uint64_t i = 0; i < kProcesses; ++i) {
      children.push_back(started(pool->path(), [i](Pool* own) {
        std::vector<std::thread> threads;
        for (uint64_t t = 0; t < kThreads; ++t) {
          threads.emplace_back([own, key = Key{100 + i * kThreads + t, 1}] {
            for (uint64_t round = 0; round < kRounds; ++round) {
              read(own, kHere);
              read(own, kAbsent);
              put(own, key, 10);
              own->remove(key);
            }
          });
        }
        for (std::thread& thread : threads) thread.join();
      }));
    }
    for (const pid_t child : children) {
      int status = 0;
      waitpid(child, &status, 0);
      EXPECT(status == 0);
    }
  }
  constexpr uint64_t kAll = 2 * kProcesses * kThreads * kRounds;
  const PoolCounts all{kAll, kAll, 1 + kAll, kAll, 0, kAll * kBytes, kBytes + 10 * kAll};
  EXPECT(pool->counts() == all);
}

// What a killed process has done is counted, but for the call in which it was killed.
void killed_processes() {
  const auto pool = Pool::create("", Geometry::of(16 * 128, 128, 8, 2, 4));
  put(pool.get(), kHere, kBytes);
  void* const shared =
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* const num_done = static_cast<std::atomic<uint64_t>*>(shared);
  uint64_t least = 0, cleaned = 0;
  for (uint64_t death = 1; death <= 20; ++death) {
    *num_done = 0;
    const pid_t child = started(pool->path(), [&](Pool* own) {
      for (;; *num_done += 1) {
        read(own, kHere);
        put(own, {50, 1}, 10);
        own->remove({50, 1});
      }
    });
    while (*num_done < death) usleep(100);
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    pool->reap();
    cleaned += pool->remove({50, 1});
    least += *num_done;
    const uint64_t most = least + death;  // a call of each
    const PoolCounts counts = pool->counts();
    EXPECT(counts.num_hits >= least && counts.num_hits <= most);
    EXPECT(counts.read_bytes >= kBytes * least && counts.read_bytes <= kBytes * most);
    EXPECT(counts.num_stored >= 1 + least && counts.num_stored <= 1 + most);
    EXPECT(counts.num_removed >= least + cleaned && counts.num_removed <= most + cleaned);
  }
  munmap(shared, 4096);
}

}  // namespace

int main() {
  changes();
  several_processes();
  killed_processes();
  return failures() != 0;
}
