#include "transfer/net/lost_links.h"

#include <algorithm>

namespace mk::transfer {

void LostLinks::add(const Link& link) noexcept {
  const std::lock_guard lock(mutex_);
  links_.push_back(link);
  any_ = true;
}

void LostLinks::recover(const Link& link) {
  const std::lock_guard lock(mutex_);
  const auto is_it = [&](const Link& lost) { return lost.id == link.id; };
  links_.erase(std::remove_if(links_.begin(), links_.end(), is_it), links_.end());
  any_ = !links_.empty();
}

std::vector<Link> LostLinks::all() const {
  const std::lock_guard lock(mutex_);
  return links_;
}

// A link may have been lost again meanwhile, in a later epoch.
void LostLinks::forget(const std::vector<Link>& ended) {
  const std::lock_guard lock(mutex_);
  const auto is_over = [&](const Link& lost) {
    return std::any_of(ended.begin(), ended.end(), [&](const Link& link) {
      return link.id == lost.id && link.epoch == lost.epoch;
    });
  };
  links_.erase(std::remove_if(links_.begin(), links_.end(), is_over), links_.end());
  any_ = !links_.empty();
}

LostLinksRef LostLinksTable::of(uint64_t instance) {
  const std::lock_guard lock(mutex_);
  if (entries_.count(instance) == 0) forget_some();
  Entry& entry = entries_[instance];
  if (!entry.links) entry.links = std::make_shared<LostLinks>();
  entry.met_at = ++num_met_;
  return entry.links;
}

void LostLinksTable::forget_some() {
  size_t num_left = 0;
  auto oldest = entries_.end();
  for (auto item = entries_.begin(); item != entries_.end();) {
    const Entry& entry = item->second;
    if (entry.is_left() && entry.links->all().empty()) {
      item = entries_.erase(item);
      continue;
    }
    if (entry.is_left()) {
      ++num_left;
      if (oldest == entries_.end() || entry.met_at < oldest->second.met_at) oldest = item;
    }
    ++item;
  }
  if (num_left > kMaxLeft) entries_.erase(oldest);
}

}  // namespace mk::transfer
