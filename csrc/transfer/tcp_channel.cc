#include "transfer/tcp_channel.h"

#include "transfer/error.h"
#include "transfer/exchange.h"
#include "transfer/handshake.h"

namespace mk::transfer {

void TcpChannel::connect(Interrupt& interrupt, const Deadline& deadline) {
  const Limit limit{deadline, interrupt};
  socket_.close();
  Socket socket = Socket::connect(addresses_, limit);
  ++link_.epoch;  // the peer ends the connection before this one, should it still be serving it
  check_instance(introduce(socket, *own_, link_, host_, limit).hello.instance);
  socket_ = std::move(socket);
}

void TcpChannel::check_instance(uint64_t instance) {
  if (peer_instance_ != 0 && instance != peer_instance_) {
    // Its addresses, which our callers hold, are not those of the engine that was there before.
    throw Failure("the peer was restarted; open it again");
  }
  peer_instance_ = instance;
}

void TcpChannel::run(const Request& request, Interrupt& interrupt, const Deadline& deadline,
                     uint64_t& num_bytes_done) {
  if (!socket_.at_rest()) connect(interrupt, deadline);
  try {
    Exchange(socket_, request, ++request_id_, {deadline, interrupt}, num_bytes_done).run();
  } catch (const Refused&) {
    throw;  // the connection is good
  } catch (...) {
    socket_.close();
    throw;
  }
}

}  // namespace mk::transfer
