// A process is killed between any two of its instructions while it uses a pool.
//
//   test_pool_steps <seed> <deaths>
//
// A child is stepped through everything that changes a pool, one instruction at a time (ptrace(2)),
// and killed after that many; what is left must be a pool without a loss. Exits with 77 where
// tracing is forbidden.
#include <signal.h>
#include <sys/ptrace.h>
#include <unistd.h>

#include <cstdlib>

#include "pool_checks.h"

namespace {

using namespace mk::store;

constexpr Key kOld[] = {{1, 1}, {2, 1}, {3, 1}, {4, 1}};  // there before; 4 goes, 3 is evicted
constexpr Key kNew[] = {{11, 1}, {12, 1}, {13, 1}};
constexpr int kForbidden = 77;

struct Object {
  Object(const Key& key, uint64_t num_bytes) : key(key), bytes(num_bytes) {
    fill(bytes.data(), num_bytes, key);
  }
  void put(Pool* pool, Retention retention) {
    put_from(pool, key, {{bytes.data(), bytes.size()}}, {true, retention});
  }
  Key key;
  std::vector<char> bytes;
};

void use(Pool* pool, Object* small, Object* large) {
  small->put(pool, Retention::kNormal);
  Writing writing;
  pool->begin(kNew[1], 100, &writing);
  pool->abort(writing);
  const auto pin = pool->pin(kOld[3]);
  pool->remove(kOld[3]);  // doomed, for it is pinned
  pool->unpin(*pin);
  pool->retain(kOld[0], Retention::kHard);
  const Key newest_first[] = {kOld[1], kOld[2]}, oldest_first[] = {kOld[2], kOld[1]};
  pool->order_uses(newest_first, 2);
  pool->order_uses(oldest_first, 2);
  pool->evict(64, Policy::kLru);    // takes 3
  pool->evict(64, Policy::kSieve);  // and another one
  large->put(pool, Retention::kSoft);
}

pid_t start(const std::string& path) {
  const pid_t child = fork();
  if (child != 0) return child;
  auto pool = Pool::open(path);
  Object small(kNew[0], 10), large(kNew[2], 200);
  if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(kForbidden);
  raise(SIGSTOP);
  use(pool.get(), &small, &large);
  _exit(0);
}

// Steps the child until it has made `steps` of them, then kills it; returns how many it made.
long step(pid_t child, long steps) {
  int status = 0;
  waitpid(child, &status, 0);
  if (WIFEXITED(status)) std::exit(WEXITSTATUS(status) == kForbidden ? kForbidden : 1);
  for (long made = 0; made < steps; ++made) {
    if (ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) != 0) std::exit(kForbidden);
    waitpid(child, &status, 0);
    if (WIFEXITED(status)) return made;
  }
  kill(child, SIGKILL);
  waitpid(child, &status, 0);
  return steps;
}

std::shared_ptr<Pool> fresh() {
  Geometry geometry = Geometry::of(16 * 64, 64, 8, 3, 4);
  geometry.num_buckets = 1;  // one chain, which any entry can break
  auto pool = Pool::create("", geometry);
  for (const Key& key : {kOld[2], kOld[0], kOld[1], kOld[3]}) put(pool.get(), key, 60);
  pool->keep_removals();
  return pool;
}

// Whether the removal was noted, and nothing else.
bool is_noted(const Pool& pool, const Key& key) {
  std::vector<Key> removed;
  uint64_t end = 0;
  EXPECT(pool.removals().read(0, &removed, &end) && removed.size() == end);
  for (const Key& other : removed) EXPECT(other.hash == key.hash && other.scope == key.scope);
  return !removed.empty();
}

bool die_after(long steps, long* made) {
  const auto pool = fresh();
  Watch watch(pool);
  KeySet seen;
  follow(&watch, &seen);
  *made = step(start(pool->path()), steps);
  follow(&watch, &seen);
  const bool was_repaired = pool->stats().num_repairs > 0;
  const std::vector<Key> keys = check_pool(pool.get());
  EXPECT(pool->contains(kOld[0]));  // nothing was done to it, but that it is kept
  EXPECT(pool->contains(kOld[3]) || is_noted(*pool, kOld[3]));
  EXPECT(keys.size() >= 2 && keys.size() <= 6);
  EXPECT(seen.size() == keys.size());
  for (const Key& key : keys) EXPECT(seen.count({key.hash, key.scope}) == 1);
  // The call in which it died may be missing.
  const PoolCounts counts = pool->counts();
  const auto counted = static_cast<int64_t>(counts.num_stored) -
                       static_cast<int64_t>(counts.num_removed + counts.num_evicted);
  EXPECT(std::abs(counted - static_cast<int64_t>(keys.size())) <= 1);
  EXPECT(counts.num_stored >= 4 && counts.num_stored <= 6);
  put(pool.get(), {77, 1}, 5);  // uses what was freed
  EXPECT(check_pool(pool.get()).size() == keys.size() + 1);
  pool->retain(kOld[0], Retention::kNormal);
  check_usable(pool.get(), steps % 2 ? Policy::kLru : Policy::kSieve);
  return was_repaired;
}

}  // namespace

int main(int, char** arguments) {
  std::mt19937_64 random(std::strtoull(arguments[1], nullptr, 10));
  const long deaths = std::atol(arguments[2]);
  long all = 0, made = 0;
  die_after(1L << 40, &all);  // to its end
  int repairs = 0;
  for (long i = 0; i < deaths; ++i) {
    const long steps = all * i / deaths + static_cast<long>(random() % (all / deaths + 1));
    repairs += die_after(steps, &made);
  }
  EXPECT(repairs > deaths / 20);  // it died with the mutex now and then
  std::printf("%ld instructions, %ld deaths, %d with the mutex\n", all, deaths, repairs);
  return failures() != 0;
}
