#include "transfer/net/peer_identity.h"

namespace mk::transfer {

void PeerIdentity::check(uint64_t instance, const std::string& name) {
  const std::lock_guard lock(mutex_);
  if (links_) {
    if (instance == instance_) return;
    // The addresses that our callers hold are not valid in the new engine.
    throw Failure("the peer was restarted; open it again", FailureKind::kGone);
  }
  const bool is_expected = expected_ == 0 || (instance == expected_ && name == name_);
  if (!is_expected) throw Failure(another_engine());
  instance_ = instance;
  links_ = table_->of(instance);
  lost_ = links_.get();
}

}  // namespace mk::transfer
