// ObjectService: lets peers of a transfer engine read a pool's objects by key, in one round trip
// and without this process's Python. An object is pinned while it is sent, and a written one
// becomes visible once all of it has arrived.
//
//   engine.serve(std::make_shared<ObjectService>(pool, options));
//
// It makes no policy decisions: a full pool is reported as such. Layer: served, above store and
// transfer. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "served/object_wire.h"
#include "served/redis_publisher.h"
#include "store/pool.h"
#include "transfer/base/service.h"

namespace mk::served {

class ObjectService final : public transfer::Service {
 public:
  // What peers have done since the last query, for bookkeeping in Python. The pool counts it.
  struct Done {
    std::vector<store::Key> read;  // for counting uses; empty if the pool is all
    bool is_listed_in_vain;        // the directory may list for this pool what was not stored
  };

  struct Options {
    bool is_all;     // all objects are in the pool: one not found there is absent
    bool may_write;  // peers may also put and remove objects
    bool checksums;  // of the objects that they put
  };

  ObjectService(std::shared_ptr<store::Pool> pool, const Options& options)
      : pool_(std::move(pool)), options_(options) {}

  // Whether peers with write permission may put objects from now on. Puts that were admitted before
  // are already being written to the pool.
  void let_put(bool takes_puts) { takes_puts_ = takes_puts; }

  // Lists what peers put if they ask for that. Null: nothing can be listed.
  void let_publish(std::shared_ptr<RedisPublisher> publisher) {
    const std::lock_guard lock(mutex_);
    publisher_.swap(publisher);
  }

  std::unique_ptr<transfer::Exchange> begin(const std::string& request,
                                            uint64_t payload_bytes) override;
  Done take_done();

 private:
  class Reading;
  class Storing;
  class Removing;

  std::shared_ptr<RedisPublisher> publisher();
  void note_listed_in_vain();
  void check_takes_puts() const;

  const std::shared_ptr<store::Pool> pool_;
  const Options options_;
  std::atomic<bool> takes_puts_{true};
  std::mutex mutex_;
  Done done_{};
  std::shared_ptr<RedisPublisher> publisher_;
};

}  // namespace mk::served
