// Links: a fence between the successive connections of an initiator. Before a new connection of a
// link is answered, the previous one has ended and no longer touches memory: what was written over
// the old one never lands after what is written over the new one.
//
//   const Links::Hold hold = links.enter(id, epoch, interrupt, limit);    // until ~Hold
//
// Layer: transfer. Thread-safe.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "transfer/limit.h"

namespace mk::transfer {

struct LinkId {
  uint64_t instance;  // of the initiator
  uint64_t link;

  bool operator<(const LinkId& other) const {
    return std::pair(instance, link) < std::pair(other.instance, other.link);
  }
};

class Links {
  struct Entry {
    uint64_t epoch = 0;           // the highest that has come
    Interrupt* inside = nullptr;  // of the connection that holds the link
    uint64_t inside_epoch = 0;    // of that connection
    size_t num_users = 0;         // that one, and those that wait for it to leave
    uint64_t left_at = 0;         // by the clock of departures
  };

 public:
  class Hold {
   public:
    Hold(Links& links, Entry& entry) : links_(&links), entry_(&entry) {}
    Hold(Hold&& other) noexcept
        : links_(other.links_), entry_(std::exchange(other.entry_, nullptr)) {}
    ~Hold() {
      if (entry_) links_->leave(*entry_);
    }

   private:
    Links* links_;
    Entry* entry_;
  };

  // Interrupts the connection that holds the link, and waits for it to leave. Throws Rejected: the
  // epoch is not above all earlier ones (kOldEpoch), or the limit (kStillBusy). `interrupt` belongs
  // to the one that enters.
  Hold enter(const LinkId& id, uint64_t epoch, Interrupt& interrupt, const Limit& limit);

  // Ends a connection that will not be re-established, and waits for it to leave: the link no
  // longer admits epochs up to this one. Throws Refused at the limit.
  void fence(const LinkId& id, uint64_t epoch, const Limit& limit);

 private:
  void leave(Entry& entry);
  void forget_one();

  std::mutex mutex_;
  std::condition_variable left_;
  std::map<LinkId, Entry> entries_;
  uint64_t num_departures_ = 0;
};

}  // namespace mk::transfer
