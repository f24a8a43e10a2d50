#include "transfer/peer_identity.h"

#include <algorithm>

#include "transfer/channel.h"
#include "transfer/error.h"

namespace mk::transfer {

void PeerIdentity::check(uint64_t instance) {
  uint64_t before = 0;
  if (instance_.load() == 0 && expected_ != 0 && instance != expected_) {
    throw Failure(kAnotherEngine);
  }
  if (!instance_.compare_exchange_strong(before, instance) && before != instance) {
    // Its addresses, which our callers hold, are not those of the engine that was there before.
    throw Failure("the peer was restarted; open it again");
  }
}

void PeerIdentity::lose(const Link& link) noexcept {
  const std::lock_guard lock(mutex_);
  lost_.push_back(link);
  has_lost_ = true;
}

void PeerIdentity::recover(const Link& link) {
  const std::lock_guard lock(mutex_);
  const auto is_it = [&](const Link& lost) { return lost.id == link.id; };
  lost_.erase(std::remove_if(lost_.begin(), lost_.end(), is_it), lost_.end());
  has_lost_ = !lost_.empty();
}

std::vector<Link> PeerIdentity::lost() const {
  const std::lock_guard lock(mutex_);
  return lost_;
}

// One may have been lost once more meanwhile, in another epoch.
void PeerIdentity::forget(const std::vector<Link>& ended) {
  const std::lock_guard lock(mutex_);
  const auto is_over = [&](const Link& lost) {
    return std::any_of(ended.begin(), ended.end(), [&](const Link& link) {
      return link.id == lost.id && link.epoch == lost.epoch;
    });
  };
  lost_.erase(std::remove_if(lost_.begin(), lost_.end(), is_over), lost_.end());
  has_lost_ = !lost_.empty();
}

}  // namespace mk::transfer
