// Watch: which objects came to a pool and went since the last look, whichever process did it.
//
//   Watch watch(pool);
//   watch.look();  // the first time: everything that is there
//
// A look compares only the entries that changed since the last one, and takes no lock if there are
// none. What came and went between two looks is not seen. Layer: store. Thread-safe.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "store/pool.h"

namespace mk::store {

class Watch {
 public:
  // In this order: a key in both was removed, and then stored again.
  struct Found {
    std::vector<Key> removed, stored;
  };

  explicit Watch(std::shared_ptr<Pool> pool) : pool_(std::move(pool)) {}
  // Throws SystemError (ETIMEDOUT) if a stopped process holds the pool: the next look has it all.
  Found look();

 private:
  struct Object {
    Key key;
    uint64_t word;  // of its entry; 0: none
    bool has_changed;
  };
  struct Change {
    uint32_t entry;
    Object before;
  };

  void compare(uint32_t at);

  const std::shared_ptr<Pool> pool_;
  std::mutex looking_;
  std::vector<Object> objects_;  // by entry
  uint64_t end_ = 0;             // of the changes seen; from 0 on a pool does not have them all
  std::vector<Change> changed_;  // in this look, and those that failed just before
};

}  // namespace mk::store
