// SieveQueue: entries in order of arrival, and a hand that moves from old to new.
//
//   queue.push(entry);  queue.remove(entry);  queue.swap(entry, other);
//   for (uint32_t entry = queue.hand(); entry != kNone; queue.pass()) ...
//
// The SIEVE policy: an entry visited since the hand last passed keeps its place and loses its mark;
// any other is evicted. A hit moves nothing. (Y. Zhang et al., "SIEVE is simpler than LRU", NSDI
// 2024.) Layer: store.
#pragma once

#include <utility>

#include "store/layout.h"

namespace mk::store {

class SieveQueue {
 public:
  explicit SieveQueue(const View& view)
      : links_(view.links),
        header_(*view.header),
        num_entries_(view.geometry.num_entries),
        damage_(view.damage) {}

  void push(uint32_t entry) { insert(entry, kNone); }

  void remove(uint32_t entry) {
    const Link link = links_[entry];
    uint32_t& from_newer = link.newer == kNone ? header_.newest : at(link.newer).older;
    uint32_t& from_older = link.older == kNone ? header_.oldest : at(link.older).newer;
    expect(from_newer == entry && from_older == entry);
    if (header_.hand == entry) header_.hand = link.newer;
    from_newer = link.older;
    from_older = link.newer;
  }

  // Exchanges the places of two entries; the hand stays at its place.
  void swap(uint32_t a, uint32_t b) {
    if (a == b) return;
    if (links_[b].newer == a) std::swap(a, b);
    const uint32_t hand = header_.hand == a ? b : header_.hand == b ? a : header_.hand;
    const uint32_t newer_than_a = links_[a].newer;
    const uint32_t newer_than_b = links_[b].newer;
    remove(a);
    if (newer_than_a != b) {
      remove(b);
      insert(b, newer_than_a);
    }
    insert(a, newer_than_b);
    header_.hand = hand;
  }

  uint32_t newest() const { return header_.newest; }
  uint32_t older(uint32_t entry) const { return at(entry).older; }

  // The entry under the hand, kNone if the queue is empty; after the newest comes the oldest.
  uint32_t hand() {
    if (header_.hand == kNone) header_.hand = header_.oldest;
    const uint32_t hand = header_.hand;
    expect(hand < num_entries_ || hand == kNone);
    return hand;
  }
  void pass() { header_.hand = at(header_.hand).newer; }

 private:
  // Makes it the next older than `newer`; kNone: the newest of all.
  void insert(uint32_t entry, uint32_t newer) {
    uint32_t& place = newer == kNone ? header_.newest : at(newer).older;
    const uint32_t older = place;
    (older == kNone ? header_.oldest : at(older).newer) = entry;
    links_[entry] = {newer, older};
    place = entry;
  }

  Link& at(uint32_t entry) const {
    expect(entry < num_entries_);
    return links_[entry];
  }
  void expect(bool condition) const {
    if (!condition) damage_.report("the queue of its objects contradicts itself");
  }

  Link* const links_;
  Header& header_;
  const uint32_t num_entries_;
  const Damage& damage_;
};

}  // namespace mk::store
