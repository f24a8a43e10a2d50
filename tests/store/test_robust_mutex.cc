// The mutex by itself: its holder dies, its repair fails, its holder is stopped.
//
//   test_robust_mutex [stopped]
#include "store/robust_mutex.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "common/check.h"
#include "expect.h"

namespace {

using mk::store::RobustMutex;

RobustMutex& shared_mutex() {
  void* const at = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto* const mutex = static_cast<RobustMutex*>(at);
  mutex->init();
  return *mutex;
}

// A child that holds the mutex, and then is no more or is stopped.
pid_t hold(RobustMutex& mutex, int signal) {
  const pid_t child = fork();
  if (child == 0) {
    const RobustMutex::Lock lock(mutex, [] {});
    raise(signal);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, WUNTRACED);
  return child;
}

void a_dead_holder_is_repaired_once() {
  RobustMutex& mutex = shared_mutex();
  int repairs = 0;
  const auto lock = [&] { const RobustMutex::Lock lock(mutex, [&] { ++repairs; }); };
  lock();
  EXPECT(repairs == 0);
  hold(mutex, SIGKILL);
  lock();
  lock();
  EXPECT(repairs == 1);
  hold(mutex, SIGKILL);
  lock();
  EXPECT(repairs == 2);
}

void a_failed_repair_is_tried_again() {
  RobustMutex& mutex = shared_mutex();
  hold(mutex, SIGKILL);
  int failures_to_repair = 0, repairs = 0;
  for (int i = 0; i < 3; ++i) {
    try {
      const RobustMutex::Lock lock(mutex, [] { throw mk::Unavailable("no memory"); });
    } catch (const mk::Unavailable&) {
      ++failures_to_repair;
    }
  }
  for (int i = 0; i < 2; ++i) const RobustMutex::Lock lock(mutex, [&] { ++repairs; });
  EXPECT(failures_to_repair == 3 && repairs == 1);
}

void a_stopped_holder_is_waited_for_no_longer_than_the_limit() {
  RobustMutex& mutex = shared_mutex();
  const pid_t child = hold(mutex, SIGSTOP);
  int error_number = 0;
  try {
    const RobustMutex::Lock lock(mutex, [] {});
  } catch (const mk::SystemError& error) {
    error_number = error.code().value();
  }
  EXPECT(error_number == ETIMEDOUT);
  kill(child, SIGCONT);
  const RobustMutex::Lock lock(mutex, [] {});  // and it goes on
}

}  // namespace

int main(int count, char**) {
  if (count > 1) {
    a_stopped_holder_is_waited_for_no_longer_than_the_limit();
  } else {
    a_dead_holder_is_repaired_once();
    a_failed_repair_is_tried_again();
  }
  return failures() != 0;
}
