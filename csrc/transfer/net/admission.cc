#include "transfer/net/admission.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "transfer/wire/reject_reason.h"

namespace mk::transfer {
namespace {

constexpr char kTooManyStrangers[] = "too many strangers";
constexpr char kWasIdle[] = "it was idle, and others needed its place";

}  // namespace

size_t& Admission::count_of(Counts& counts, Stage stage) {
  if (stage == Stage::kEnding) return counts.num_ending;
  return stage == Stage::kPeer ? counts.num_peers : counts.num_strangers;
}

std::optional<Admission::Visit> Admission::enter(const std::string& host) {
  const std::lock_guard lock(mutex_);
  const auto found = by_host_.find(host);
  const size_t of_host = found == by_host_.end() ? 0 : found->second.num_strangers;
  const bool host_is_full = of_host >= limits_.num_strangers / 2;
  if (host_is_full || total_.num_strangers >= limits_.num_strangers) {
    if (!end_a_stranger(host_is_full ? host : host_with_most_strangers())) return std::nullopt;
  }
  guests_.emplace_back(host);
  ++by_host_[host].num_strangers;
  ++total_.num_strangers;
  return Visit(*this, std::prev(guests_.end()));
}

void Admission::set(Guests::iterator guest, Interrupt& interrupt) {
  const std::lock_guard lock(mutex_);
  guest->interrupt = &interrupt;
}

void Admission::set(Guests::iterator guest, Stage stage) {
  const std::lock_guard lock(mutex_);
  const bool is_stranger = guest->stage == Stage::kSilent || guest->stage == Stage::kSpeaking;
  if (is_stranger) guest->stage = stage;
}

void Admission::admit(Guests::iterator guest, bool has_proved) {
  const std::lock_guard lock(mutex_);
  if (guest->stage == Stage::kEnding) throw Rejected(RejectReason::kFull);
  const bool host_is_full = by_host_[guest->host].num_peers >= limits_.num_peers / 2;
  if (host_is_full || total_.num_peers >= limits_.num_peers) {
    if (!end_an_idle_peer(host_is_full ? &guest->host : nullptr))
      throw Rejected(RejectReason::kFull);
  }
  guest->has_proved = has_proved;
  guest->idle_since = Clock::now().time_since_epoch().count();
  move(*guest, Stage::kPeer);
}

void Admission::Visit::is_busy(bool busy) {
  if (!busy) guest_->idle_since = Clock::now().time_since_epoch().count();
  guest_->is_busy = busy;
}

void Admission::leave(Guests::iterator guest) {
  const std::lock_guard lock(mutex_);
  const auto of_host = by_host_.find(guest->host);
  for (Counts* counts : {&total_, &of_host->second}) --count_of(*counts, guest->stage);
  const Counts& left = of_host->second;
  if (left.num_peers + left.num_strangers + left.num_ending == 0) by_host_.erase(of_host);
  guests_.erase(guest);
}

void Admission::move(Guest& guest, Stage stage) {
  for (Counts* counts : {&total_, &by_host_[guest.host]}) {
    --count_of(*counts, guest.stage);
    ++count_of(*counts, stage);
  }
  guest.stage = stage;
}

void Admission::end(Guest& guest, const char* reason) {
  guest.interrupt->signal(reason);
  move(guest, Stage::kEnding);
}

std::string Admission::host_with_most_strangers() const {
  const auto fewer = [](const auto& a, const auto& b) {
    return a.second.num_strangers < b.second.num_strangers;
  };
  return std::max_element(by_host_.begin(), by_host_.end(), fewer)->first;
}

// False if there is none, or those whose places were taken are not gone for the most part: each has
// a thread. A quarter of a host's places remain for those that have just come and say nothing yet.
bool Admission::end_a_stranger(const std::string& host) {
  if (total_.num_ending >= limits_.num_strangers) return false;
  std::vector<Guest*> silent, speaking;
  for (Guest& guest : guests_) {
    if (guest.host != host || !guest.interrupt) continue;
    if (guest.stage == Stage::kSilent) silent.push_back(&guest);
    if (guest.stage == Stage::kSpeaking) speaking.push_back(&guest);
  }
  const bool spares_silent = silent.size() < limits_.num_strangers / 8 && !speaking.empty();
  if (!spares_silent && silent.empty()) return false;
  Guest* const chosen = spares_silent ? speaking[random_() % speaking.size()] : silent.front();
  end(*chosen, kTooManyStrangers);
  return true;
}

bool Admission::end_an_idle_peer(const std::string* host) {
  const Clock::rep latest = (Clock::now() - limits_.idle).time_since_epoch().count();
  Guest* longest = nullptr;
  for (Guest& guest : guests_) {
    const bool is_candidate = guest.stage == Stage::kPeer && !guest.has_proved && guest.interrupt &&
                              !guest.is_busy && guest.idle_since <= latest &&
                              (!host || guest.host == *host);
    if (is_candidate && (!longest || guest.idle_since < longest->idle_since)) longest = &guest;
  }
  if (longest) end(*longest, kWasIdle);
  return longest != nullptr;
}

}  // namespace mk::transfer
