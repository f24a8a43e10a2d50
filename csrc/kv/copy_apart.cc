#include "kv/copy_apart.h"

#include <algorithm>

#include "common/radix_sort.h"

namespace mk::kv {
namespace {

Touched read_by(const CopyRange& range, int64_t index) {
  return {reinterpret_cast<uintptr_t>(range.src), static_cast<uint64_t>(range.num_bytes), index,
          false};
}

Touched written_by(const CopyRange& range, int64_t index) {
  return {reinterpret_cast<uintptr_t>(range.dst), static_cast<uint64_t>(range.num_bytes), index,
          true};
}

// The address range of one side, and the order of its addresses.
struct Reach {
  uint64_t begin = UINT64_MAX, end = 0, last_begin = UINT64_MAX;
  bool ascends = true, descends = true;

  void add(const Touched& one) {
    ascends = ascends && one.begin >= end;
    descends = descends && one.end() <= last_begin;
    last_begin = one.begin;
    begin = std::min(begin, one.begin);
    end = std::max(end, one.end());
  }
};

}  // namespace

std::vector<Touched> what_may_meet(const std::vector<CopyRange>& ranges) {
  Reach src, dst;
  for (const CopyRange& range : ranges) {
    src.add(read_by(range, 0));
    dst.add(written_by(range, 0));
  }
  const bool sides_meet = src.begin < dst.end && dst.begin < src.end;
  std::vector<Touched> touched;
  if (!sides_meet && (dst.ascends || dst.descends)) return touched;
  touched.reserve(ranges.size() * (sides_meet ? 2 : 1));
  for (size_t i = 0; i < ranges.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    touched.push_back(written_by(ranges[i], index));
    if (sides_meet) touched.push_back(read_by(ranges[i], index));
  }
  return touched;
}

std::optional<Conflict> find_conflict(std::vector<Touched> touched) {
  radix_sort(touched, [](const Touched& one) { return one.begin; });
  // Of the ranges so far, the one of either kind with the highest end.
  const Touched* furthest[2] = {nullptr, nullptr};
  for (const Touched& one : touched) {
    for (const Touched* before : furthest) {
      if (before == nullptr || before->end() <= one.begin) continue;
      if (one.is_written) return Conflict{*before, one};
      if (before->is_written) return Conflict{one, *before};
    }
    const Touched*& last = furthest[one.is_written];
    if (last == nullptr || last->end() < one.end()) last = &one;
  }
  return std::nullopt;
}

}  // namespace mk::kv
