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
      : items_(view.heap),
        positions_(view.heap_positions),
        size_(view.header->heap_size),
        num_entries_(view.geometry.num_entries),
        damage_(view.damage) {}

  uint32_t size() const {
    const uint32_t size = size_;
    expect(size <= num_entries_);
    return size;
  }
  HeapItem top() const {  // of one that is not empty
    const HeapItem item = items_[0];
    expect(item.entry < num_entries_ && positions_[item.entry] == 0);
    return item;
  }

  void push(uint32_t entry, uint64_t stamp) {
    const uint32_t size = size_;
    expect(size < num_entries_);
    put(size, {stamp, entry});
    size_ = size + 1;
    rise(size);
  }

  void restamp(uint32_t entry, uint64_t stamp) {
    const uint32_t size = this->size();
    const uint32_t at = position_of(entry, size);
    items_[at].stamp = stamp;
    settle(at, size);
  }

  void remove(uint32_t entry) {
    const uint32_t last = size() - 1;
    const uint32_t at = position_of(entry, last + 1);
    size_ = last;
    if (at == last) return;
    put(at, items_[last]);
    settle(at, last);
  }

 private:
  void expect(bool condition) const {
    if (!condition) damage_.report("the heap of its uses contradicts itself");
  }

  uint32_t position_of(uint32_t entry, uint32_t size) const {
    const uint32_t at = positions_[entry];
    expect(at < size && items_[at].entry == entry);
    return at;
  }

  void put(uint32_t at, const HeapItem& item) {
    expect(item.entry < num_entries_);
    items_[at] = item;
    positions_[item.entry] = at;
  }

  void swap(uint32_t a, uint32_t b) {
    const HeapItem item = items_[a];
    put(a, items_[b]);
    put(b, item);
  }

  void settle(uint32_t at, uint32_t size) {
    rise(at);
    sink(at, size);
  }

  void rise(uint32_t at) {
    for (; at > 0 && items_[at].stamp < items_[(at - 1) / 2].stamp; at = (at - 1) / 2) {
      swap(at, (at - 1) / 2);
    }
  }

  void sink(uint32_t at, uint32_t size) {
    while (true) {
      const uint64_t left = 2 * uint64_t{at} + 1;
      if (left >= size) return;
      uint32_t child = static_cast<uint32_t>(left);
      if (left + 1 < size && items_[left + 1].stamp < items_[left].stamp) ++child;
      if (items_[at].stamp <= items_[child].stamp) return;
      swap(at, child);
      at = child;
    }
  }

  HeapItem* const items_;
  uint32_t* const positions_;
  uint32_t& size_;
  const uint32_t num_entries_;
  const Damage& damage_;
};

}  // namespace mk::store
