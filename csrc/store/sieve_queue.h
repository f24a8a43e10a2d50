// SieveQueue: entries in order of arrival, and a hand that moves from old to new.
//
//   queue.push(entry);  queue.remove(entry);
//   for (uint32_t entry = queue.hand(); entry != kNone; queue.pass()) ...
//
// The SIEVE policy: an entry visited since the hand last passed keeps its place and loses its mark;
// any other is evicted. A hit moves nothing. (Y. Zhang et al., "SIEVE is simpler than LRU", NSDI
// 2024.) Layer: store.
#pragma once

#include "store/layout.h"

namespace mk::store {

class SieveQueue {
 public:
  explicit SieveQueue(const View& view) : links_(view.links), header_(*view.header) {}

  void push(uint32_t entry) {
    links_[entry] = {kNone, header_.newest};
    (header_.newest == kNone ? header_.oldest : links_[header_.newest].newer) = entry;
    header_.newest = entry;
  }

  void remove(uint32_t entry) {
    const Link link = links_[entry];
    if (header_.hand == entry) header_.hand = link.newer;
    (link.newer == kNone ? header_.newest : links_[link.newer].older) = link.older;
    (link.older == kNone ? header_.oldest : links_[link.older].newer) = link.newer;
  }

  // The entry under the hand, kNone if the queue is empty; after the newest comes the oldest.
  uint32_t hand() {
    if (header_.hand == kNone) header_.hand = header_.oldest;
    return header_.hand;
  }
  void pass() { header_.hand = links_[header_.hand].newer; }

 private:
  Link* const links_;
  Header& header_;
};

}  // namespace mk::store
