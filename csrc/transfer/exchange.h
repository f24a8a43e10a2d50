// Exchange: one request over a connected socket, from the initiator's side.
//
//   Exchange(socket, request, request_id, limit, num_bytes_done).run();
//
// Layer: transfer. A request of several batches is checked whole before its first byte moves, so
// that one refused for a range has changed nothing. Writes keep kWindow batches under way.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "transfer/request.h"
#include "transfer/socket.h"
#include "transfer/wire.h"

namespace mk::transfer {

class Exchange {
 public:
  Exchange(Socket& socket, const Request& request, uint64_t request_id, const Limit& limit,
           uint64_t& num_bytes_done)
      : socket_(socket),
        request_(request),
        request_id_(request_id),
        limit_(limit),
        num_bytes_done_(num_bytes_done) {}

  void run();  // throws Refused (the connection stays good) or another Failure (it does not)

 private:
  void check();
  void write();
  void read();
  void notify();

  // Sends one batch, after waiting for room in the window.
  void post(Op op, uint64_t first_range, const Range* ranges, size_t num_ranges,
            const std::vector<iovec>& payload, uint64_t num_bytes);
  void settle();       // waits for every batch under way; throws Refused if one was refused
  void receive_ack();  // of the oldest batch under way

  struct Posted {
    Op op;
    uint64_t num_bytes;
  };

  Socket& socket_;
  const Request& request_;
  const uint64_t request_id_;
  const Limit limit_;
  uint64_t& num_bytes_done_;
  std::deque<Posted> posted_;
  std::vector<iovec> parts_;
  std::string refusal_;
};

}  // namespace mk::transfer
