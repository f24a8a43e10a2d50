// The allocator against a model that keeps all ranges in a map and joins nothing.
#include "store/allocator.h"

#include <iterator>
#include <map>
#include <random>
#include <vector>

#include "expect.h"

namespace {

using mk::store::Allocator;
using mk::store::AllocatorState;
using mk::store::Damage;
using mk::store::kNone;
using mk::store::Range;
using mk::store::Span;

const Damage kDamage("of the test");

struct Model {
  uint32_t num_units;
  std::map<uint32_t, uint32_t> used;  // start -> size

  struct Gaps {
    uint32_t count = 0, units = 0, largest = 0;
  };
  Gaps gaps() const {
    Gaps gaps;
    uint32_t end = 0;
    const auto gap = [&](uint32_t from, uint32_t to) {
      if (from == to) return;
      ++gaps.count;
      gaps.units += to - from;
      gaps.largest = std::max(gaps.largest, to - from);
    };
    for (const auto& [start, size] : used) {
      gap(end, start);
      end = start + size;
    }
    gap(end, num_units);
    return gaps;
  }
  bool is_free(uint32_t start, uint32_t size) const {
    if (start > num_units || size > num_units - start) return false;
    const auto behind = used.lower_bound(start);
    if (behind != used.end() && behind->first < start + size) return false;
    return behind == used.begin() || std::prev(behind)->first + std::prev(behind)->second <= start;
  }
};

// What may be asked for in vain although there is a gap as large: less than a class, 1 / 32.
uint32_t surely_found(uint32_t size) { return size < 64 ? size : size + size / 16; }

void run(uint32_t num_units, uint32_t max_used, uint32_t max_size, std::mt19937_64& random) {
  AllocatorState state;
  std::vector<Span> spans(2 * max_used + 1);
  Allocator allocator(&state, spans.data(), static_cast<uint32_t>(spans.size()), num_units,
                      &kDamage);
  std::vector<Range> ranges;
  EXPECT(allocator.rebuild(&ranges));
  Model model{num_units, {}};
  std::vector<uint32_t> live;
  for (int step = 0; step < 20000; ++step) {
    // Waves: it fills up, and drains again.
    const bool grows = random() % 100 < ((step / 1000) % 2 ? 30 : 70);
    if (grows && live.size() < max_used) {
      const uint32_t size = 1 + static_cast<uint32_t>(random() % max_size);
      const uint32_t span = allocator.allocate(size);
      if (span == kNone) {
        EXPECT(model.gaps().largest < surely_found(size));
      } else {
        EXPECT(allocator.size(span) == size);
        EXPECT(model.is_free(allocator.start(span), size));
        model.used[allocator.start(span)] = size;
        live.push_back(span);
      }
    } else if (!live.empty()) {
      std::swap(live[random() % live.size()], live.back());
      model.used.erase(allocator.start(live.back()));
      allocator.release(live.back());
      live.pop_back();
    }
    if (step % 1000 == 999) {  // as after a crash
      ranges.clear();
      for (const auto& [start, size] : model.used) ranges.push_back({start, size, kNone});
      EXPECT(allocator.rebuild(&ranges));
      live.clear();
      for (const Range& range : ranges) {
        EXPECT(allocator.start(range.span) == range.start);
        live.push_back(range.span);
      }
    }
    const Model::Gaps gaps = model.gaps();
    EXPECT(allocator.free_units() == gaps.units);
    EXPECT(allocator.num_free_spans() == gaps.count);
    EXPECT(allocator.largest_free_units() == gaps.largest);
  }
  for (const uint32_t span : live) allocator.release(span);
  EXPECT(allocator.largest_free_units() == num_units && allocator.num_free_spans() == 1);
}

// A hole of exactly the size is found, whatever classes are: a pool of equal objects stays full.
void equal_objects_fill_all(uint32_t size) {
  constexpr uint32_t kObjects = 100;
  AllocatorState state;
  std::vector<Span> spans(2 * kObjects + 1);
  Allocator allocator(&state, spans.data(), static_cast<uint32_t>(spans.size()), kObjects * size,
                      &kDamage);
  std::vector<Range> none;
  EXPECT(allocator.rebuild(&none));
  std::vector<uint32_t> live;
  for (uint32_t i = 0; i < kObjects; ++i) live.push_back(allocator.allocate(size));
  EXPECT(allocator.free_units() == 0 && allocator.allocate(1) == kNone);
  for (uint32_t i = 0; i < kObjects; i += 2) allocator.release(live[i]);
  for (uint32_t i = 0; i < kObjects; i += 2) EXPECT((live[i] = allocator.allocate(size)) != kNone);
  EXPECT(allocator.free_units() == 0);
}

void wrong_ranges_are_refused() {
  AllocatorState state;
  std::vector<Span> spans(9);
  Allocator allocator(&state, spans.data(), 9, 100, &kDamage);
  for (std::vector<Range> ranges :
       std::vector<std::vector<Range>>{{{0, 5, 0}, {4, 2, 0}},  // overlapping
                                       {{90, 11, 0}},           // beyond the end
                                       {{10, 0, 0}},            // of nothing
                                       {{10, UINT32_MAX, 0}},
                                       {{UINT32_MAX, 1, 0}}}) {
    EXPECT(!allocator.rebuild(&ranges));
  }
}

}  // namespace

int main() {
  std::mt19937_64 random(1);
  run(1000, 64, 40, random);
  run(100000, 500, 900, random);
  run(64, 64, 1, random);
  run(UINT32_MAX, 200, 1u << 27, random);
  for (const uint32_t size : {1, 31, 32, 63, 64, 65, 801, 4097, 100003}) {
    equal_objects_fill_all(size);
  }
  wrong_ranges_are_refused();
  return failures() != 0;
}
