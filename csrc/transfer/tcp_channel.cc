#include "transfer/tcp_channel.h"

#include <string>

#include "transfer/error.h"
#include "transfer/exchange.h"
#include "transfer/greeting.h"

namespace mk::transfer {

void TcpChannel::connect(Interrupt& interrupt, const Deadline& deadline) {
  const Limit limit{deadline, interrupt};
  socket_.close();
  Socket socket = Socket::connect(addresses_, limit);
  greet(socket, limit);
  socket_ = std::move(socket);
}

void TcpChannel::greet(Socket& socket, const Limit& limit) {
  send_greeting(socket, *own_, limit);
  const Greeting peer = receive_greeting(socket, limit);
  check_version(peer.hello);
  if (expected_instance_ != 0 && peer_instance_ == 0 && peer.hello.instance != expected_instance_) {
    throw Failure(kAnotherEngine);
  }
  if (peer_instance_ != 0 && peer.hello.instance != peer_instance_) {
    // Its addresses, which our callers hold, are not those of the engine that was there before.
    throw Failure("the peer was restarted; open it again");
  }
  peer_instance_ = peer.hello.instance;
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
