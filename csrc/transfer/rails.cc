#include "transfer/rails.h"

#if MK_HAVE_VERBS
#include <algorithm>
#include <cstring>
#include <utility>

#include "common/check.h"

namespace mk::transfer {
namespace {

// A NIC that is not near the memory is taken when the near ones are so much busier.
constexpr double kFarCost = 4;

bool contains(NicSet set, size_t nic) { return set >> nic & 1; }

std::string name_of(const NicEntry& nic) {
  return printable(std::string(nic.name.data(), strnlen(nic.name.data(), nic.name.size())));
}

}  // namespace

void Rails::meet(std::vector<NicEntry> peer_nics, PeerCounters& counters) {
  peer_nics_ = std::move(peer_nics);
  rails_.clear();
  const size_t count = peer_nics_.empty() ? 0 : std::max(nics_.size(), peer_nics_.size());
  for (size_t i = 0; i < count; ++i) {
    const size_t index = i % nics_.size();
    Rail rail(nics_[index], index, counters.path(nics_[index].device->name()));
    const auto meets = [&](const NicEntry& nic) { return nic.link_layer == rail.link_layer(); };
    if (std::any_of(peer_nics_.begin(), peer_nics_.end(), meets)) rails_.push_back(std::move(rail));
  }
  if (rails_.empty()) throw Failure("the peer has no NIC that can be connected with ours");
}

void Rails::bring_up(NicQuestions& questions, bool at_once, const Limit& limit) {
  at_once = at_once && !is_any_up();
  for (size_t i = 0; i < rails_.size(); ++i) {
    if (!rails_[i].is_up() && (at_once || rails_[i].may_try())) try_all(i, questions, limit);
  }
}

// The peer's NIC of the same number first: machines of a kind have those on the same switch, or
// rail. Then, and after a failure, those behind it, in a circle.
void Rails::try_all(size_t index, NicQuestions& questions, const Limit& limit) {
  Rail& rail = rails_[index];
  const size_t count = peer_nics_.size();
  const size_t first = rail.cause().empty() ? index % count : (rail.peer_nic() + 1) % count;
  for (size_t i = 0; i < count && !rail.is_up(); ++i) {
    const size_t peer_nic = (first + i) % count;
    const bool meets = peer_nics_[peer_nic].link_layer == rail.link_layer();
    if (meets) try_one(index, peer_nic, questions, limit);
  }
}

void Rails::try_one(size_t index, size_t peer_nic, NicQuestions& questions, const Limit& limit) {
  Rail& rail = rails_[index];
  std::string cause;
  try {
    const rdma::Endpoint theirs = questions.attach(index, peer_nic, rail.open(), limit);
    const double gb_per_s = static_cast<double>(peer_nics_[peer_nic].mb_per_s) / 1e3;
    return rail.connect(theirs, peer_nic, gb_per_s);
  } catch (const Refused& refused) {
    cause = refused.what();
  } catch (const Failure&) {  // of the connection
    throw;
  } catch (const std::exception& error) {
    cause = error.what();
  }
  rail.close();
  rail.pause(cause, peer_nic);
}

bool Rails::is_any_up() const {
  return std::any_of(rails_.begin(), rails_.end(), [](const Rail& rail) { return rail.is_up(); });
}

Rail* Rails::best(const Slice& slice, const RemoteRegion& remote) {
  Rail* best = nullptr;
  double least = 0;
  for (Rail& rail : rails_) {
    if (!rail.is_up() || !remote.on_nics[rail.peer_nic()]) continue;
    const double here = contains(slice.local->near, rail.nic()) ? 1 : kFarCost;
    const double there = contains(remote.near, rail.peer_nic()) ? 1 : kFarCost;
    const double cost = rail.seconds_for(slice.num_bytes) * here * there;
    if (!best || cost < least) {
      best = &rail;
      least = cost;
    }
  }
  return best;
}

std::string Rails::describe() const {
  std::string text;
  for (const Rail& rail : rails_) {
    text += concat(text.empty() ? "" : ", ", nics_[rail.nic()].device->name(), " to ",
                   name_of(peer_nics_[rail.peer_nic()]),
                   rail.is_up() ? "" : concat(" (down: ", rail.cause(), ")"));
  }
  return text;
}

}  // namespace mk::transfer
#endif
