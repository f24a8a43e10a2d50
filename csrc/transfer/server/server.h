// Server: accepts peers' connections; one thread listens, and one serves each connection.
//
// Layer: transfer.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "common/fd.h"
#include "transfer/net/endpoint.h"
#include "transfer/server/session.h"

namespace mk::transfer {

class Server {
 public:
  // Takes bound sockets and listens on them. `own` must outlive the server.
  Server(Endpoint& own, std::vector<Fd> bound);
  Server(const Server&) = delete;
  ~Server();  // ends every session and joins every thread; does not wait for peers

 private:
  struct Served {
    Served(Endpoint& own, Gate& gate, Admission::Visit visit, Socket socket)
        : session(own, gate, std::move(visit), std::move(socket)) {}
    Session session;
    std::thread thread;
  };

  void listen();
  void accept_one(const Fd& listening);
  void forget_finished();

  Endpoint& own_;
  Gate gate_;
  std::vector<Fd> listening_;
  std::atomic<bool> closing_{false};
  Interrupt wake_;            // of the listening thread: the server closes, or a session has ended
  std::list<Served> served_;  // the listening thread's, until it is joined
  std::thread thread_;
};

}  // namespace mk::transfer
