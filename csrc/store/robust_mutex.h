// RobustMutex: a mutex in shared memory that outlives the processes that hold it.
//
//   mutex->init();  // once, by the creator of the memory
//   const RobustMutex::Lock lock(*mutex, [&] { repair_what_it_guards(); });
//
// If the holder dies, the next one to lock it repairs first. If that one dies too, or the repair
// throws, the one after it does. Layer: store.
#pragma once

#include <pthread.h>

#include <chrono>
#include <functional>

namespace mk::store {

class RobustMutex {
 public:
  // How long a lock waits: a holder works for milliseconds, unless its process is stopped.
  static constexpr std::chrono::seconds kLimit{10};

  void init();

  class Lock {
   public:
    // Throws SystemError (ETIMEDOUT) at the limit, and whatever `repair` throws.
    Lock(RobustMutex& mutex, const std::function<void()>& repair,
         std::chrono::milliseconds limit = kLimit);
    Lock(const Lock&) = delete;
    ~Lock();

   private:
    RobustMutex& mutex_;
  };

 private:
  pthread_mutex_t mutex_;
  bool needs_repair_;
};

}  // namespace mk::store
