// NicQueries: an initiator's queries to a target about NICs, over the accompanying connection,
// whose other end is a RdmaTarget.
//
//   NicQueries queries(socket);
//   rail.connect(queries.attach(0, nic, rail.open(), limit), ...);
//
// Layer: transfer. Nothing else may be in flight on the connection. All throw Failure, and Refused
// with the target's text.
#pragma once

#include <cstdint>
#include <vector>

#include "transfer/net/socket.h"
#include "transfer/wire/nic_wire.h"
#include "transfer/wire/wire.h"

namespace mk::transfer {

class NicQueries {
 public:
  explicit NicQueries(Socket& socket) : socket_(socket) {}

  std::vector<NicEntry> nics(const Limit& limit);
  // A queue pair on the target's NIC, for that rail, connected to ours.
  rdma::Endpoint attach(size_t rail, size_t nic, const rdma::Endpoint& ours, const Limit& limit);
  // Ends it: nothing in flight lands any more.
  void detach(size_t rail, const Limit& limit);
  // The regions that contain these addresses.
  std::vector<RemoteRegion> keys(const std::vector<uint64_t>& addresses, size_t num_nics,
                                 const Limit& limit);
  // Waits for the immediates that were sent over these rails.
  void flush(const std::vector<uint32_t>& rails, const Limit& limit);

 private:
  std::vector<char> query(Op op, const void* query, size_t num_bytes, size_t entry_bytes,
                          const Limit& limit);

  Socket& socket_;
  uint64_t count_ = 0;
};

}  // namespace mk::transfer
