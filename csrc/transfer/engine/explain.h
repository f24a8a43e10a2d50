// Questions to a peer apart from transfers, over a separate channel like those it has.
//
// explain: which way a transfer goes, and why. It is tested, not deduced: the peer is asked for its
// rights, and its memory is accessed.
//
//   const Explanation found = explain(*peer, own_regions, {local, 4096}, {remote, 4096}, deadline);
//   found.path.means, found.reasons, found.write_refusal.empty()
//
// Layer: transfer.
#pragma once

#include <string>
#include <vector>

#include "transfer/peer/peer.h"

namespace mk::transfer {

struct Explanation {
  Path path;                         // with its names in statistics
  std::vector<std::string> reasons;  // a sentence each: the transport's first, then the way's
  std::string write_refusal;         // why a write would be refused; "": it would be allowed
  std::string read_refusal;
};

// Throws InvalidArgument: the local range is not registered. TransferError: the peer cannot be
// asked.
Explanation explain(const Peer& peer, const RegionTable& own_regions, const Range& local,
                    const Range& remote, const Deadline& deadline);

// The peer's regions, in the order of registration, as far as peers may use them. Throws
// TransferError: the peer refuses, or cannot be asked.
std::vector<RegionTable::Listed> list_regions(const Peer& peer, const Deadline& deadline);

}  // namespace mk::transfer
