#include "transfer/server/server.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <exception>

#include "common/check.h"
#include "common/thread.h"

namespace mk::transfer {
namespace {

constexpr int kBacklog = 512;
constexpr int kRetryMs = 100;  // after the machine ran out of descriptors or memory

}  // namespace

Server::Server(Endpoint& own, std::vector<Fd> bound) : own_(own), listening_(std::move(bound)) {
  for (const Fd& fd : listening_) {
    MK_SYSCALL(::listen(fd.get(), kBacklog), "listen on " + own.address);
  }
  thread_ = start_thread([this] { listen(); });
}

Server::~Server() {
  closing_ = true;
  wake_.signal("the server closes");
  thread_.join();
  for (Fd& fd : listening_) shut_down(fd);
  for (Served& served : served_) served.session.interrupt();
  for (Served& served : served_) served.thread.join();
}

void Server::listen() {
  while (!closing_) {
    std::vector<pollfd> polled{{wake_.fd(), POLLIN, 0}};
    for (const Fd& fd : listening_) polled.push_back({fd.get(), POLLIN, 0});
    poll(polled.data(), polled.size(), -1);
    wake_.clear();
    forget_finished();
    for (size_t i = 0; i < listening_.size(); ++i) {
      if (polled[i + 1].revents) accept_one(listening_[i]);
    }
  }
}

void Server::accept_one(const Fd& listening) {
  SocketAddress from{{}, sizeof(sockaddr_storage)};
  Fd fd(accept4(listening.get(), from.get(), &from.num_bytes, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!fd) {
    if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) return;
    pollfd wake{wake_.fd(), POLLIN, 0};  // the listening socket stays ready: do not spin
    poll(&wake, 1, kRetryMs);
    return;
  }
  try {
    const std::optional<uid_t> user = peer_user(fd);
    if (user && !own_.credentials.local_users.admit(*user)) {
      return own_.rejections.count(process_of_another());  // closes it
    }
    const std::string host = user ? concat("user ", *user) : host_of(from);
    std::optional<Admission::Visit> visit = gate_.admission.enter(host);
    if (!visit) return own_.rejections.count("too many strangers");
    Served& served = served_.emplace_back(own_, gate_, std::move(*visit), Socket(std::move(fd)));
    served.thread = start_thread([this, &session = served.session] {
      session.run();
      wake_.signal("a session has ended");
    });
  } catch (const std::exception&) {
    // Out of threads or descriptors: this peer's connection is closed; the others are served.
    if (!served_.empty() && !served_.back().thread.joinable()) served_.pop_back();
  }
}

void Server::forget_finished() {
  served_.remove_if([](Served& served) {
    if (!served.session.finished()) return false;
    served.thread.join();
    return true;
  });
}

}  // namespace mk::transfer
