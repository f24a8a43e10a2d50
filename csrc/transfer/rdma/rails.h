// Rails: the paths to a peer, from NICs of ours to its: as many as the side with more NICs has, and
// as many between the NICs that are near the memory at either end, if these are others.
//
//   Rails rails(nics);
//   rails.meet(queries.nics(limit), counters);
//   rails.want(slice, remote);
//   rails.bring_up(queries, /*at_once=*/true, limit);
//   Rail* rail = rails.best(slice, remote);
//
// Layer: transfer. One thread.
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "transfer/rdma/nic_queries.h"
#include "transfer/rdma/rail.h"

namespace mk::transfer {

class Rails {
 public:
  explicit Rails(const Nics& nics) : nics_(nics) {}

  // Makes them, all down. Throws Failure if the peer has no NIC on a fabric of ours.
  void meet(std::vector<NicEntry> peer_nics, PeerCounters& counters);
  void clear();  // our NICs release our memory

  // Whether a port here and one there that can meet are active; of theirs, as last learned.
  bool has_active_ports() const;
  void learn_ports(const std::vector<NicEntry>& peer_nics);

  // Makes those, still down, that are best for the slice. Invalidates references to rails.
  void want(const Slice& slice, const RemoteRegion& remote);

  // Connects those whose pause has ended; `at_once`: all, if none is up. Throws Failure for the
  // connection; for a rail, see its reason(). Whether it has tried any.
  bool bring_up(NicQueries& queries, bool at_once, const Limit& limit);
  bool is_any_up() const;
  // Connects, whatever their pauses, those that are down and can reach a slice that no other does;
  // makes one where all of a NIC have moved to the peer's NICs without the memory. Throws as
  // bring_up; invalidates references to rails.
  void reach(const Slice& slice, const RemoteRegion& remote, NicQueries& queries,
             const Limit& limit);

  // The one that will finish the slice first; null: none reaches it.
  Rail* best(const Slice& slice, const RemoteRegion& remote);

  std::string describe() const;              // which NIC to which, and what is down
  std::string trouble() const;               // the same, of those that have failed
  std::vector<std::string> nics_up() const;  // names of ours
  const std::string& reason() const { return rails_.front().reason(); }
  // reaches a slice whose memory NICs at both ends know
  std::string why_none(const Slice& slice, const RemoteRegion& remote) const;
  size_t num_peer_nics() const { return peer_nics_.size(); }

  size_t size() const { return rails_.size(); }
  Rail& operator[](size_t i) { return rails_[i]; }
  size_t index_of(const Rail& rail) const { return &rail - rails_.data(); }
  std::vector<Rail>::iterator begin() { return rails_.begin(); }
  std::vector<Rail>::iterator end() { return rails_.end(); }

 private:
  std::string describe(const Rail& rail) const;
  void add(size_t nic, size_t peer_nic);
  bool can_meet(size_t nic, size_t peer_nic) const;
  // The peer's NICs to which a rail from that NIC can go; and, of them, that reach the slice.
  NicSet met_by(size_t nic) const;
  NicSet met_by(size_t nic, const Slice& slice, const RemoteRegion& remote) const;
  void try_all(size_t index, NicSet theirs, NicQueries& queries, const Limit& limit);
  // Returns why it is not up; empty: it is.
  std::string try_one(size_t index, size_t peer_nic, const rdma::Endpoint& ours,
                      NicQueries& queries, const Limit& limit);

  const Nics& nics_;
  PeerCounters* counters_ = nullptr;
  std::vector<NicEntry> peer_nics_;
  std::vector<Rail> rails_;
  std::set<std::pair<size_t, size_t>> made_;    // between which NICs rails were made first
  std::set<std::pair<NicSet, NicSet>> wanted_;  // NICs that are near at both ends
};

}  // namespace mk::transfer
