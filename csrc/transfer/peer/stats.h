// Stats: the counters of all peers that an engine has met, by name and transport.
//
//   CountersRef counters = stats->enter("10.0.0.2:4711", Transport::kTcp);   // a peer is opened
//   for (const Stats::Row& row : stats->table()) ...
//
// Layer: transfer. Thread-safe. Peers with the same name and transport share their counters, also
// one after the other. Counters no longer in use are kept, but for at most kMaxLeft peers: beyond
// that, the one left the longest ago is added to the row `kOtherPeers`, and forgotten.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "transfer/channel/channel.h"
#include "transfer/request/counters.h"

namespace mk::transfer {

constexpr char kOtherPeers[] = "other peers";  // contains a space, which no peer's name does

class Stats : public std::enable_shared_from_this<Stats> {
 public:
  static constexpr size_t kMaxLeft = 1024;

  struct Row {
    std::string peer;
    Transport transport;
    std::shared_ptr<const PeerCounters> counters;
  };

  CountersRef enter(const std::string& peer, Transport transport);
  std::vector<Row> table() const;

 private:
  using Key = std::pair<std::string, Transport>;
  struct Entry {
    CountersRef counters = std::make_shared<PeerCounters>();
    size_t num_users = 0;
    uint64_t left_at = 0;  // by the clock of departures
  };

  void leave(const Key& key);
  void forget_one();

  mutable std::mutex mutex_;
  std::map<Key, Entry> entries_;
  size_t num_left_ = 0;
  uint64_t num_departures_ = 0;
};

}  // namespace mk::transfer
