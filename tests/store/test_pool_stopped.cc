// A process is stopped while it holds the pool: what others give up meanwhile is not lost.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "common/check.h"
#include "pool_checks.h"
#include "store/memory.h"
#include "store/robust_mutex.h"

namespace {

using namespace mk::store;

constexpr Key kKey{7, 1};

// A child that holds the mutex of a pool, and is stopped.
pid_t hold(const std::string& path) {
  const pid_t child = fork();
  if (child == 0) {
    const auto memory = PoolMemory::open(path);
    {
      const RobustMutex::Lock lock(reinterpret_cast<Header*>(memory->data())->mutex, [] {});
      raise(SIGSTOP);
    }
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, WUNTRACED);
  return child;
}

void go_on(pid_t child) {
  kill(child, SIGCONT);
  waitpid(child, nullptr, 0);
}

Writing begin(Pool* pool) {
  Writing writing{};
  EXPECT(pool->begin(kKey, 100, &writing) == PutState::kOpen);
  return writing;
}

void statistics_do_not_wait_longer_than_they_are_told(Pool* pool) {
  const pid_t child = hold(pool->path());
  try {
    pool->stats(std::chrono::milliseconds(10));
    EXPECT(!"the pool is held");
  } catch (const mk::SystemError&) {
  }
  go_on(child);
  EXPECT(pool->stats(std::chrono::milliseconds(0)).num_ready == 0);
}

void what_is_given_up_meanwhile_ends_with_the_next_change(Pool* pool) {
  const Writing writing = begin(pool);
  const pid_t child = hold(pool->path());
  pool->give_up({writing});  // after the limit
  go_on(child);
  EXPECT(put(pool, kKey, 100) == PutState::kOpen);
  EXPECT(pool->remove(kKey));
  check_pool(pool);
}

void what_else_is_given_up_meanwhile_does_not_wait(Pool* pool) {
  const Writing writing = begin(pool);
  const pid_t child = hold(pool->path());
  for (int i = 0; i < 100000; ++i) pool->give_up({writing});  // hours, if each waited
  go_on(child);
  EXPECT(put(pool, kKey, 100) == PutState::kOpen);
  EXPECT(pool->remove(kKey));
  check_pool(pool);
}

// Closes the pool meanwhile, and lives on.
pid_t give_up_and_close(const std::string& path) {
  const pid_t child = fork();
  if (child == 0) {
    auto pool = Pool::open(path);
    const Writing writing = begin(pool.get());
    const pid_t holder = hold(path);
    pool->give_up({writing});
    pool.reset();
    go_on(holder);
    raise(SIGSTOP);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, WUNTRACED);
  return child;
}

void what_cannot_be_ended_at_all_ends_with_the_process(Pool* pool) {
  const pid_t child = give_up_and_close(pool->path());
  EXPECT(put(pool, kKey, 100) == PutState::kBeingWritten);
  go_on(child);
  EXPECT(put(pool, kKey, 100) == PutState::kOpen);
  EXPECT(pool->remove(kKey));
  check_pool(pool);
}

}  // namespace

int main() {
  const auto pool = Pool::create("", Geometry::of(16 * 64, 64, 8, 3, 4));
  statistics_do_not_wait_longer_than_they_are_told(pool.get());
  what_is_given_up_meanwhile_ends_with_the_next_change(pool.get());
  what_else_is_given_up_meanwhile_does_not_wait(pool.get());
  what_cannot_be_ended_at_all_ends_with_the_process(pool.get());
  return failures() != 0;
}
