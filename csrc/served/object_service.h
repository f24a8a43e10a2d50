// ObjectService: has a pool's objects read by peers of a transfer engine, by key, in one round trip
// and without this process's Python. What is sent is pinned until it is sent, and what is written
// is seen when all of it has come.
//
//   engine.serve(std::make_shared<ObjectService>(pool, options));
//
// It decides nothing: a pool that is full says so. Layer: served, above store and transfer.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "served/object_wire.h"
#include "store/pool.h"
#include "transfer/service.h"

namespace mk::served {

class ObjectService final : public transfer::Service {
 public:
  // What peers have done since somebody asked last, for who keeps books in Python.
  struct Done {
    uint64_t num_hits, num_misses, num_bytes;  // of reads
    std::vector<store::Key> read;              // unless the pool is all, for who counts uses
    uint64_t num_bytes_stored;
    std::vector<store::Key> changed;  // in order
    std::vector<bool> is_there;
    bool is_cut;  // more was changed, and nobody has asked for so long
  };

  struct Options {
    bool is_all;     // there are no objects but those in the pool: what is not there is absent
    bool may_write;  // peers may also put objects, and remove them
    bool checksums;  // of what they put
  };

  ObjectService(std::shared_ptr<store::Pool> pool, const Options& options)
      : pool_(std::move(pool)), options_(options) {}

  // Whether peers that may write may put objects from now on. What they put nevertheless is being
  // written in the pool by now.
  void let_put(bool takes_puts) { takes_puts_ = takes_puts; }

  std::unique_ptr<transfer::Exchange> begin(const std::string& question,
                                            uint64_t payload_bytes) override;
  Done take_done();

 private:
  class Reading;
  class Storing;
  class Removing;

  void check_takes_puts() const;
  void note_read(const store::Key& key);
  void note(const store::Key& key, bool is_there);

  const std::shared_ptr<store::Pool> pool_;
  const Options options_;
  std::atomic<bool> takes_puts_{true};
  std::mutex mutex_;
  Done done_{};
};

}  // namespace mk::served
