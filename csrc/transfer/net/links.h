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
#include <list>
#include <map>
#include <mutex>
#include <utility>

#include "transfer/base/limit.h"

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
    uint64_t epoch = 0;                   // the highest that has come
    Interrupt* inside = nullptr;          // of the connection that holds the link
    uint64_t inside_epoch = 0;            // of that connection
    size_t num_users = 0;                 // that one, and those that wait for it to leave
    std::list<LinkId>::iterator place{};  // in used_ or idle_
  };

 public:
  class Hold {
   public:
    Hold(Links& links, std::map<LinkId, Entry>::iterator item) : links_(&links), item_(item) {}
    Hold(Hold&& other) noexcept
        : links_(std::exchange(other.links_, nullptr)), item_(other.item_) {}
    ~Hold() {
      if (links_) links_->leave(item_);
    }

   private:
    Links* links_;
    std::map<LinkId, Entry>::iterator item_;
  };

  // Interrupts the connection that holds the link, and waits for it to leave. Throws Rejected: the
  // epoch is not above all earlier ones (kOldEpoch), or the limit (kStillBusy). `interrupt` belongs
  // to the one that enters.
  Hold enter(const LinkId& id, uint64_t epoch, Interrupt& interrupt, const Limit& limit);

  // Ends a connection that will not be re-established, and waits for it to leave: the link no
  // longer admits epochs up to this one. Throws Refused at the limit.
  void fence(const LinkId& id, uint64_t epoch, const Limit& limit);

 private:
  using Entries = std::map<LinkId, Entry>;

  // With one more user, until release().
  Entries::iterator use(const LinkId& id);
  void release(Entries::iterator item);
  void leave(Entries::iterator item);

  std::mutex mutex_;
  std::condition_variable left_;
  Entries entries_;
  std::list<LinkId> used_;
  std::list<LinkId> idle_;  // links without users, the one that was used the longest ago first
};

}  // namespace mk::transfer
