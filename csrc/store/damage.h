// Damage: reports that what the memory of a pool says contradicts itself, as after a stray write.
//
//   const Damage damage("/dev/shm/kv", &header->mutex);
//   if (next >= num_entries) damage.report("a chain of its index leads out of it");
//
// What follows from the entries is then rebuilt by the next holder of the mutex. Layer: store.
// Python face: mooncake_kernels/errors.py (host/errors.cc translates).
#pragma once

#include <string>
#include <utility>

#include "common/check.h"
#include "store/robust_mutex.h"

namespace mk::store {

// Python: PoolDamaged.
struct PoolDamaged : Unavailable {
  using Unavailable::Unavailable;
};

class Damage {
 public:
  // `mutex`: of the pool; null: there is nothing to be rebuilt.
  explicit Damage(std::string path, RobustMutex* mutex = nullptr)
      : path_(std::move(path)), mutex_(mutex) {}

  [[noreturn, gnu::cold, gnu::noinline]] void report(const char* what) const {
    if (mutex_) mutex_->request_repair();
    throw PoolDamaged(concat("the pool ", path_, " is damaged: ", what));
  }

 private:
  std::string path_;
  RobustMutex* mutex_;
};

}  // namespace mk::store
