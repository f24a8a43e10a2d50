#include "transfer/rdma/rails.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/check.h"

namespace mk::transfer {
namespace {

// A NIC far from the memory is used if the near ones are this much busier.
constexpr double kFarCost = 4;
constexpr NicSet kAllNics = ~NicSet{0};

bool contains(NicSet set, size_t nic) { return set >> nic & 1; }

std::vector<size_t> members(NicSet set, size_t num_nics) {
  std::vector<size_t> members;
  for (size_t nic = 0; nic < num_nics; ++nic) {
    if (contains(set, nic)) members.push_back(nic);
  }
  return members;
}

// Pairs each NIC of either side once; those of the side with fewer are repeated as needed.
std::vector<std::pair<size_t, size_t>> pairs(const std::vector<size_t>& ours,
                                             const std::vector<size_t>& theirs) {
  std::vector<std::pair<size_t, size_t>> pairs;
  if (ours.empty() || theirs.empty()) return pairs;
  for (size_t i = 0; i < std::max(ours.size(), theirs.size()); ++i) {
    pairs.emplace_back(ours[i % ours.size()], theirs[i % theirs.size()]);
  }
  return pairs;
}

uint32_t link_layer_of(const Nic& nic) {
  return code_of_link_layer(nic.device->info().ports.at(nic.port - 1).link_layer);
}

std::string name_of(const NicEntry& nic) {
  return printable(std::string(nic.name.data(), strnlen(nic.name.data(), nic.name.size())));
}

}  // namespace

void Rails::meet(std::vector<NicEntry> peer_nics, PeerCounters& counters) {
  clear();
  peer_nics_ = std::move(peer_nics);
  counters_ = &counters;
  // Pairs NICs of equal numbers: in machines of the same type they are on the same switch, or rail.
  const auto ours = members(kAllNics, nics_.size()), theirs = members(kAllNics, peer_nics_.size());
  for (const auto& [nic, peer_nic] : pairs(ours, theirs)) {
    const auto meets = [&, own = nic](size_t other) { return can_meet(own, other); };
    if (std::any_of(theirs.begin(), theirs.end(), meets)) add(nic, peer_nic);
  }
  if (rails_.empty())
    throw Failure("the peer has no NIC that can be connected with ours",
                  FailureKind::kIncompatible);
}

bool Rails::has_active_ports() const {
  for (size_t nic = 0; nic < nics_.size(); ++nic) {
    for (const size_t peer_nic : members(met_by(nic), peer_nics_.size())) {
      if (peer_nics_[peer_nic].is_active && is_active(nics_[nic])) return true;
    }
  }
  return false;
}

void Rails::learn_ports(const std::vector<NicEntry>& peer_nics) {
  for (size_t i = 0; i < std::min(peer_nics.size(), peer_nics_.size()); ++i) {
    peer_nics_[i].is_active = peer_nics[i].is_active;
  }
}

void Rails::clear() {
  rails_.clear();
  made_.clear();
  wanted_.clear();
}

void Rails::add(size_t nic, size_t peer_nic) {
  made_.insert({nic, peer_nic});
  rails_.emplace_back(nics_[nic], nic, peer_nic, counters_->path(nics_[nic].device->name()));
}

bool Rails::can_meet(size_t nic, size_t peer_nic) const {
  return link_layer_of(nics_[nic]) == peer_nics_[peer_nic].link_layer;
}

NicSet Rails::met_by(size_t nic) const {
  NicSet met = 0;
  for (size_t peer_nic = 0; peer_nic < peer_nics_.size(); ++peer_nic) {
    if (can_meet(nic, peer_nic)) met |= NicSet{1} << peer_nic;
  }
  return met;
}

NicSet Rails::met_by(size_t nic, const Slice& slice, const RemoteRegion& remote) const {
  if (!slice.local->regions[nic]) return 0;
  NicSet met = met_by(nic);
  for (const size_t peer_nic : members(met, peer_nics_.size())) {
    if (!remote.on_nics[peer_nic]) met &= ~(NicSet{1} << peer_nic);
  }
  return met;
}

void Rails::want(const Slice& slice, const RemoteRegion& remote) {
  if (!wanted_.insert({slice.local->near, remote.near}).second) return;
  for (const auto& [nic, peer_nic] :
       pairs(members(slice.local->near, nics_.size()), members(remote.near, peer_nics_.size()))) {
    if (rails_.size() == kMaxRails) return;
    if (made_.count({nic, peer_nic}) > 0 || !can_meet(nic, peer_nic)) continue;
    add(nic, peer_nic);
  }
}

bool Rails::bring_up(NicQueries& queries, bool at_once, const Limit& limit) {
  at_once = at_once && !is_any_up();
  bool has_tried = false;
  for (size_t i = 0; i < rails_.size(); ++i) {
    if (rails_[i].is_up() || !(at_once || rails_[i].may_try())) continue;
    try_all(i, met_by(rails_[i].nic()), queries, limit);
    has_tried = true;
  }
  return has_tried;
}

void Rails::reach(const Slice& slice, const RemoteRegion& remote, NicQueries& queries,
                  const Limit& limit) {
  for (size_t nic = 0; nic < nics_.size(); ++nic) {
    const NicSet theirs = met_by(nic, slice, remote);
    if (theirs == 0) continue;
    const auto is_down = [&](const Rail& rail) { return rail.nic() == nic && !rail.is_up(); };
    const size_t index = std::find_if(begin(), end(), is_down) - begin();
    if (index == kMaxRails) continue;
    if (index == rails_.size()) add(nic, members(theirs, peer_nics_.size()).front());
    try_all(index, theirs, queries, limit);
  }
}

// First the peer's NIC that the rail was made for; then, and after a failure, the following ones,
// cyclically. All that fails of it is one failure.
void Rails::try_all(size_t index, NicSet theirs, NicQueries& queries, const Limit& limit) {
  Rail& rail = rails_[index];
  const size_t count = peer_nics_.size();
  const size_t first = rail.peer_nic() + (rail.reason().empty() ? 0 : 1);
  size_t tried = rail.peer_nic();
  std::string reason;
  for (size_t i = 0; i < count; ++i) {
    const size_t peer_nic = (first + i) % count;
    if (!contains(theirs, peer_nic)) continue;
    rdma::Endpoint ours;
    try {
      ours = rail.open();
    } catch (const std::exception& error) {  // of our NIC, whichever of the peer's it is to reach
      reason = error.what();
      break;
    }
    tried = peer_nic;
    reason = try_one(index, peer_nic, ours, queries, limit);
    if (reason.empty()) return;
  }
  rail.close();
  rail.pause(reason, tried);
}

std::string Rails::try_one(size_t index, size_t peer_nic, const rdma::Endpoint& ours,
                           NicQueries& queries, const Limit& limit) {
  try {
    const rdma::Endpoint theirs = queries.attach(index, peer_nic, ours, limit);
    const double gb_per_s = static_cast<double>(peer_nics_[peer_nic].mb_per_s) / 1e3;
    rails_[index].connect(theirs, peer_nic, gb_per_s);
  } catch (const Refused& refused) {
    return refused.what();
  } catch (const Failure&) {  // of the connection
    throw;
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

bool Rails::is_any_up() const {
  return std::any_of(rails_.begin(), rails_.end(), [](const Rail& rail) { return rail.is_up(); });
}

Rail* Rails::best(const Slice& slice, const RemoteRegion& remote) {
  Rail* best = nullptr;
  double least = 0;
  for (Rail& rail : rails_) {
    if (!rail.is_up() || !slice.local->regions[rail.nic()] || !remote.on_nics[rail.peer_nic()])
      continue;
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

std::string Rails::why_none(const Slice& slice, const RemoteRegion& remote) const {
  for (const Rail& rail : rails_) {
    if (!rail.is_up() && met_by(rail.nic(), slice, remote) != 0) return rail.reason();
  }
  return "no NIC with the memory here reaches one with it there";
}

std::string Rails::describe(const Rail& rail) const {
  return concat(nics_[rail.nic()].device->name(), " to ", name_of(peer_nics_[rail.peer_nic()]),
                rail.is_up() ? "" : concat(" (down: ", rail.reason(), ")"));
}

std::string Rails::describe() const {
  std::string text;
  for (const Rail& rail : rails_) text += concat(text.empty() ? "" : ", ", describe(rail));
  return text;
}

std::string Rails::trouble() const {
  std::string text;
  for (const Rail& rail : rails_) {
    if (rail.is_up() || rail.reason().empty()) continue;
    text += concat(text.empty() ? "" : ", ", describe(rail));
  }
  return text;
}

std::vector<std::string> Rails::nics_up() const {
  std::vector<std::string> names;
  for (const Rail& rail : rails_) {
    const std::string& name = nics_[rail.nic()].device->name();
    if (rail.is_up() && std::find(names.begin(), names.end(), name) == names.end())
      names.push_back(name);
  }
  return names;
}

}  // namespace mk::transfer
