#include "store/layout.h"

#include <algorithm>

#include "common/check.h"

namespace mk::store {
namespace {

constexpr uint64_t kHugePage = 2 << 20;  // alignment of the objects' bytes

uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

uint32_t power_of_two_from(uint32_t value) {
  uint32_t power = 1;
  while (power < value) power *= 2;
  return power;
}

}  // namespace

Geometry Geometry::of(uint64_t capacity_bytes, uint64_t alignment, uint64_t num_objects,
                      uint64_t num_processes, uint64_t num_pins) {
  const char* const op = "ObjectPool";
  MK_CHECK(alignment >= 64 && alignment <= kHugePage && (alignment & (alignment - 1)) == 0, op,
           ": alignment must be a power of two from 64 to ", kHugePage, ", got ", alignment);
  const uint64_t num_units = capacity_bytes / alignment;
  MK_CHECK(num_units >= 1 && num_units < kNone, op, ": capacity_bytes must be from ", alignment,
           " to ", (uint64_t{kNone} - 1) * alignment, " for this alignment, got ", capacity_bytes);
  MK_CHECK(capacity_bytes < kMaxCapacity, op, ": capacity_bytes must be below ", kMaxCapacity,
           ", got ", capacity_bytes);
  MK_CHECK(num_objects >= 1 && num_objects <= 1u << 30, op, ": num_objects must be from 1 to ",
           1u << 30, ", got ", num_objects);
  MK_CHECK(num_processes >= 1 && num_processes <= UINT16_MAX, op,
           ": num_processes must be from 1 to ", UINT16_MAX, ", got ", num_processes);
  MK_CHECK(num_pins >= 1 && num_pins <= 1u << 20, op, ": num_pins must be from 1 to ", 1u << 20,
           ", got ", num_pins);
  const uint32_t num_entries = static_cast<uint32_t>(num_objects);
  return {num_units * alignment,
          static_cast<uint32_t>(alignment),
          static_cast<uint32_t>(num_units),
          num_entries,
          power_of_two_from(num_entries),
          static_cast<uint32_t>(num_processes),
          static_cast<uint32_t>(num_pins)};
}

bool Geometry::is_possible() const {
  try {
    const Geometry whole = of(capacity_bytes, alignment, num_entries, num_rows, num_slots);
    return num_units == whole.num_units && capacity_bytes == whole.capacity_bytes &&
           num_buckets >= 1 && num_buckets <= whole.num_buckets &&
           (num_buckets & (num_buckets - 1)) == 0;
  } catch (const InvalidArgument&) {
    return false;
  }
}

View::View(char* base, const Geometry& g, char* gpu_data, const std::string& path)
    : geometry(g),
      header(reinterpret_cast<Header*>(base)),
      data(gpu_data),
      damage(path, base ? &header->mutex : nullptr) {
  uint64_t offset = 0;
  const auto place = [&](auto*& array, uint64_t count) {
    offset = round_up(offset, 64);
    array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(
        reinterpret_cast<uintptr_t>(base) + offset);
    offset += count * sizeof(*array);
  };
  place(header, 1);
  place(rows, g.num_rows);
  place(slots, uint64_t{g.num_rows} * g.num_slots);
  place(buckets, g.num_buckets);
  place(entries, g.num_entries);
  place(links, g.num_entries);
  place(heap, g.num_entries);
  place(heap_positions, g.num_entries);
  place(spans, g.num_spans());
  place(removals, kNumRemovals);
  place(changes, kNumChanges);
  if (g.device < 0) {
    offset = round_up(offset, std::max<uint64_t>(g.alignment, kHugePage));
    place(data, g.capacity_bytes);
  }
  end = offset;
}

uint64_t View::num_bytes(const Geometry& geometry) { return View(nullptr, geometry).end; }

}  // namespace mk::store
