// EngineOptions: what an engine is made from.
//
// Layer: transfer.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "transfer/memory/nics.h"
#include "transfer/net/credentials.h"

namespace mk::transfer {

struct EngineOptions {
  std::string name;    // sent to peers; empty: the address
  std::string listen;  // "host:port" to listen on; port 0 for any
  bool local;          // allowed transports; without tcp it does not listen for machines
  bool shm;
  bool cuda_ipc;
  bool tcp;
  bool file;
  std::vector<NicOptions> nics;    // rdma uses these; none: no rdma
  NearNics near_nics;              // which of these are nearest to which memory
  bool nics_required;              // refuse having none, and memory that none of them can use
  int num_lanes;                   // connections to a peer, and threads that copy
  size_t max_connections;          // to all peers
  std::chrono::microseconds spin;  // see Socket::spin_for
  Credentials credentials;
  std::vector<std::string> reached_at;  // further addresses, "host:port", that lead here

  bool is_for_processes() const { return shm || cuda_ipc; }
  bool is_for_machines() const { return tcp || !nics.empty(); }
};

}  // namespace mk::transfer
