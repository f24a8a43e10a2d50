#include "transfer/wire/admission.h"

#include "transfer/verdict.h"

namespace mk::transfer {
namespace {

constexpr size_t kMaxStrangers = 256;
constexpr size_t kMaxPeers = 2048;

}  // namespace

std::optional<Admission::Visit> Admission::enter(const std::string& host) {
  const std::lock_guard lock(mutex_);
  const auto found = by_host_.find(host);
  const size_t of_host = found == by_host_.end() ? 0 : found->second.num_strangers;
  if (total_.num_strangers >= kMaxStrangers || of_host >= kMaxStrangers / 2) return std::nullopt;
  ++by_host_[host].num_strangers;
  ++total_.num_strangers;
  return Visit(*this, host);
}

void Admission::Visit::admit() {
  admission_->admit(host_);
  is_peer_ = true;
}

void Admission::admit(const std::string& host) {
  const std::lock_guard lock(mutex_);
  Counts& of_host = by_host_[host];
  if (total_.num_peers >= kMaxPeers || of_host.num_peers >= kMaxPeers / 2) {
    throw Rejected(Verdict::kFull);
  }
  for (Counts* counts : {&total_, &of_host}) {
    --counts->num_strangers;
    ++counts->num_peers;
  }
}

void Admission::leave(const std::string& host, bool is_peer) {
  const std::lock_guard lock(mutex_);
  const auto found = by_host_.find(host);
  for (Counts* counts : {&total_, &found->second}) {
    --(is_peer ? counts->num_peers : counts->num_strangers);
  }
  if (found->second.num_peers + found->second.num_strangers == 0) by_host_.erase(found);
}

}  // namespace mk::transfer
