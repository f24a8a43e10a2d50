#include "store/robust_mutex.h"

#include <time.h>

#include <cerrno>

#include "common/check.h"

namespace mk::store {
namespace {

void check(int error_number, const char* what) {
  if (error_number != 0) throw SystemError(error_number, what);
}

// ThreadSanitizer of gcc 12 does not support pthread_mutex_clocklock.
#ifdef __SANITIZE_THREAD__
constexpr clockid_t kClock = CLOCK_REALTIME;
int lock_until(pthread_mutex_t* mutex, const timespec& until) {
  return pthread_mutex_timedlock(mutex, &until);
}
#else
constexpr clockid_t kClock = CLOCK_MONOTONIC;
int lock_until(pthread_mutex_t* mutex, const timespec& until) {
  return pthread_mutex_clocklock(mutex, kClock, &until);
}
#endif

}  // namespace

void RobustMutex::init() {
  pthread_mutexattr_t attributes;
  check(pthread_mutexattr_init(&attributes), "pthread_mutexattr_init");
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  const int error_number = pthread_mutex_init(&mutex_, &attributes);
  pthread_mutexattr_destroy(&attributes);
  check(error_number, "pthread_mutex_init");
  needs_repair_.store(0);
}

bool RobustMutex::is_one() const {
  static const int kind = [] {
    RobustMutex mutex;
    mutex.init();
    return mutex.mutex_.__data.__kind;
  }();
  return __atomic_load_n(&mutex_.__data.__kind, __ATOMIC_RELAXED) == kind;
}

RobustMutex::Lock::Lock(RobustMutex& mutex, const std::function<void()>& repair,
                        std::chrono::milliseconds limit)
    : mutex_(mutex) {
  timespec until;
  clock_gettime(kClock, &until);
  const int64_t nsec = until.tv_nsec + std::chrono::nanoseconds(limit).count();
  until.tv_sec += nsec / 1'000'000'000;
  until.tv_nsec = nsec % 1'000'000'000;
  const int error_number = lock_until(&mutex_.mutex_, until);
  if (error_number == EOWNERDEAD) {
    mutex_.needs_repair_.store(1);
    pthread_mutex_consistent(&mutex_.mutex_);
  } else {
    check(error_number, "lock the pool (ETIMEDOUT: a process that holds it is stopped)");
  }
  if (mutex_.needs_repair_.load() == 0) return;
  try {
    repair();
  } catch (...) {
    pthread_mutex_unlock(&mutex_.mutex_);
    throw;
  }
  mutex_.needs_repair_.store(0);
}

RobustMutex::Lock::~Lock() { pthread_mutex_unlock(&mutex_.mutex_); }

}  // namespace mk::store
