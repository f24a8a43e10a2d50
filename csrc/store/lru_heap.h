// LruHeap: finds the exact least recently used entry without being told of uses.
//
//   heap.push(entry, stamp);
//   heap.restamp(heap.top(), newer);  heap.remove(entry);
//
// Readers write the clock into an entry and nothing else. The heap is ordered by stamps that may be
// stale, but a use only makes a stamp larger: if the smallest stamp still equals its entry's, that
// entry is the oldest of all; otherwise it gets the current one and sinks. Entries of soft
// retention have the highest bit set and come after all others. Layer: store. Requires the pool's
// mutex.
#pragma once

#include "store/layout.h"

namespace mk::store {

class LruHeap {
 public:
  explicit LruHeap(const View& view)
      : items_(view.heap), positions_(view.heap_positions), size_(view.header->heap_size) {}

  bool empty() const { return size_ == 0; }
  HeapItem top() const { return items_[0]; }

  void push(uint32_t entry, uint64_t stamp) {
    put(size_, {stamp, entry});
    rise(size_++);
  }

  void restamp(uint32_t entry, uint64_t stamp) {
    const uint32_t at = positions_[entry];
    items_[at].stamp = stamp;
    settle(at);
  }

  void remove(uint32_t entry) {
    const uint32_t at = positions_[entry];
    if (at == --size_) return;
    put(at, items_[size_]);
    settle(at);
  }

 private:
  void put(uint32_t at, const HeapItem& item) {
    items_[at] = item;
    positions_[item.entry] = at;
  }

  void swap(uint32_t a, uint32_t b) {
    const HeapItem item = items_[a];
    put(a, items_[b]);
    put(b, item);
  }

  void settle(uint32_t at) {
    rise(at);
    sink(at);
  }

  void rise(uint32_t at) {
    for (; at > 0 && items_[at].stamp < items_[(at - 1) / 2].stamp; at = (at - 1) / 2) {
      swap(at, (at - 1) / 2);
    }
  }

  void sink(uint32_t at) {
    while (true) {
      const uint64_t left = 2 * uint64_t{at} + 1;
      if (left >= size_) return;
      uint32_t child = static_cast<uint32_t>(left);
      if (left + 1 < size_ && items_[left + 1].stamp < items_[left].stamp) ++child;
      if (items_[at].stamp <= items_[child].stamp) return;
      swap(at, child);
      at = child;
    }
  }

  HeapItem* const items_;
  uint32_t* const positions_;
  uint32_t& size_;
};

}  // namespace mk::store
