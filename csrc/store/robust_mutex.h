// RobustMutex: a mutex in shared memory that outlives the processes that hold it.
//
//   mutex->init();  // once, by the creator of the memory
//   const RobustMutex::Lock lock(*mutex, [&] { repair_what_it_guards(); });
//
// If the holder dies, the next one to lock it repairs first. If that one dies too, or the repair
// throws, the one after it does. Layer: store.
//
// While it is held, glibc keeps pointers to its thread's list of such mutexes in it: whoever writes
// there meanwhile can make the holder write anywhere. Memory that is damaged already does no harm,
// if is_one() is asked before.
#pragma once

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>

namespace mk::store {

class RobustMutex {
 public:
  // How long a lock waits: a holder works for milliseconds, unless its process is stopped.
  static constexpr std::chrono::seconds kLimit{10};

  void init();
  // Whether this memory holds such a mutex. glibc believes its kind, and ends the process for some.
  bool is_one() const;
  // Has the next holder repair first; any thread, at any time.
  void request_repair() { needs_repair_.store(1); }

  class Lock {
   public:
    // Throws SystemError (ETIMEDOUT) at the limit, also if a damaged mutex has an owner that never
    // was; and whatever `repair` throws.
    Lock(RobustMutex& mutex, const std::function<void()>& repair,
         std::chrono::milliseconds limit = kLimit);
    Lock(const Lock&) = delete;
    ~Lock();

   private:
    RobustMutex& mutex_;
  };

 private:
  pthread_mutex_t mutex_;
  std::atomic<uint8_t> needs_repair_;
};

}  // namespace mk::store
