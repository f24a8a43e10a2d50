#include "transfer/net/socket.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <thread>

#include "common/check.h"
#include "transfer/base/error.h"
#include "transfer/net/local_users.h"
#include "transfer/net/stream.h"

namespace mk::transfer {
namespace {

constexpr int kKeepAliveIdleS = 30;  // detects a dead machine in about a minute
constexpr int kKeepAliveIntervalS = 10;
constexpr int kKeepAliveProbes = 3;
constexpr std::chrono::milliseconds kBacklogCheckEvery{1};
constexpr std::chrono::milliseconds kPortCheckEvery{20};
constexpr char kNoPorts[] =
    ": all ephemeral ports of this machine for that address are in use "
    "(net.ipv4.ip_local_port_range)";
constexpr char kNotThere[] = "it is unmapped, protected or truncated";

// Lending memory costs a system call more, a notification, and the lookup of each page, which for
// less may take longer than a copy within the processor's caches. A packet holds 17 pieces of
// pages: of smaller parts the kernel makes smaller packets.
constexpr uint64_t kMinLentBytes = 256 << 10;
constexpr uint64_t kMinLentPartBytes = 16 << 10;  // on average

// After a connection was reset, what a NIC has in its queue may still leave. Linux resets a NIC
// that has sent nothing for 5 s.
constexpr double kNicS = 6;

void set_option(int fd, int level, int option, int value) {
  MK_SYSCALL(setsockopt(fd, level, option, &value, sizeof(value)), "setsockopt");
}

bool is_tcp(int fd) {
  int protocol = 0;
  socklen_t num_bytes = sizeof(protocol);
  MK_SYSCALL(getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &num_bytes), "getsockopt");
  return protocol == IPPROTO_TCP;
}

// Calls sendmsg or recvmsg until every part is used up.
template <class Wait, class Call>
void move_all(iovec*& parts, size_t& num_parts, const Limit& limit, Wait wait, Call call) {
  uint64_t num_moved = 0;
  while (num_parts > 0) {
    limit.check();
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = std::min<size_t>(num_parts, IOV_MAX);
    const ssize_t moved = call(&message, num_parts > IOV_MAX);
    if (moved >= 0) {
      advance(parts, num_parts, moved);
      num_moved += moved;
    } else if (errno == EAGAIN) {
      wait();
    } else if (errno == EFAULT) {
      throw Inaccessible(kNotThere, num_moved);
    } else if (errno != EINTR) {
      throw LinkDown(connection_reason(errno));
    }
  }
}

// By TCP's simultaneous open, a socket can connect to itself when it connects to an unused port of
// this machine and the kernel happens to pick that port as the source.
bool connected_to_itself(int fd) {
  sockaddr_storage here{}, there{};
  socklen_t here_bytes = sizeof(here), there_bytes = sizeof(there);
  getsockname(fd, reinterpret_cast<sockaddr*>(&here), &here_bytes);
  getpeername(fd, reinterpret_cast<sockaddr*>(&there), &there_bytes);
  return here_bytes == there_bytes && std::memcmp(&here, &there, here_bytes) == 0;
}

// Whether both ends have the same address: then nothing leaves this machine, and all is copied.
bool stays_here(int fd) {
  sockaddr_storage ends[2]{};
  socklen_t num_bytes[] = {sizeof(ends[0]), sizeof(ends[1])};
  getsockname(fd, reinterpret_cast<sockaddr*>(&ends[0]), &num_bytes[0]);
  getpeername(fd, reinterpret_cast<sockaddr*>(&ends[1]), &num_bytes[1]);
  if (ends[0].ss_family == AF_INET6) {
    const auto& here = reinterpret_cast<const sockaddr_in6&>(ends[0]).sin6_addr;
    const auto& there = reinterpret_cast<const sockaddr_in6&>(ends[1]).sin6_addr;
    return std::memcmp(&here, &there, sizeof(here)) == 0;
  }
  return reinterpret_cast<const sockaddr_in&>(ends[0]).sin_addr.s_addr ==
         reinterpret_cast<const sockaddr_in&>(ends[1]).sin_addr.s_addr;
}

// Returns an errno; 0 if connected.
int try_connect(int fd, const SocketAddress& address, const Limit& limit) {
  while (::connect(fd, address.get(), address.num_bytes) < 0) {
    if (errno == EAGAIN && address.storage.ss_family == AF_UNIX) {  // its backlog is full, for now
      limit.check();
      std::this_thread::sleep_for(kBacklogCheckEvery);
      continue;
    }
    if (errno != EINPROGRESS) return errno;
    pollfd polled{fd, POLLOUT, 0};
    while (poll(&polled, 1, 0) <= 0) wait_ready(fd, POLLOUT, limit);
    int error = 0;
    socklen_t error_bytes = sizeof(error);
    MK_SYSCALL(getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &error_bytes), "getsockopt");
    if (error) return error;
    break;
  }
  return connected_to_itself(fd) ? ECONNREFUSED : 0;
}

// Whether connect(2) found no local port that is free, rather than no local address from which
// there is a way: UDP needs the same address, and has ports of its own.
bool lacks_port(const SocketAddress& address) {
  if (address.storage.ss_family == AF_UNIX) return false;
  const Fd fd(::socket(address.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return fd && ::connect(fd.get(), address.get(), address.num_bytes) == 0;
}

Fd new_socket(const SocketAddress& address) {
  const int kind = SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC;
  return Fd(MK_SYSCALL(::socket(address.storage.ss_family, kind, 0), "socket"));
}

// A message of one byte, with room for a descriptor. The kernel rounds that up, so that two fit.
struct FdMessage {
  FdMessage() {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = room;
    header.msg_controllen = sizeof(room);
  }
  char byte = 0;
  iovec part{&byte, 1};
  alignas(cmsghdr) char room[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
};

template <class Call>
void exchange_message(int fd, short events, const Limit& limit, Call call) {
  while (true) {
    limit.check();
    const ssize_t moved = call();
    if (moved > 0) return;
    if (moved == 0) throw LinkDown(closed_by_peer());
    if (errno == EAGAIN) {
      wait_ready(fd, events, limit);
    } else if (errno != EINTR) {
      throw LinkDown(connection_reason(errno));
    }
  }
}

}  // namespace

void shut_down(Fd& fd) noexcept {
  if (fd) shutdown(fd.get(), SHUT_RDWR);
  fd.close();
}

Socket::Socket(Fd fd) : fd_(std::move(fd)) {
  MK_SYSCALL(fcntl(fd_.get(), F_SETFL, O_NONBLOCK), "fcntl");
  if (!is_tcp(fd_.get())) return;
  set_option(fd_.get(), IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd_.get(), SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd_.get(), IPPROTO_TCP, TCP_KEEPIDLE, kKeepAliveIdleS);
  set_option(fd_.get(), IPPROTO_TCP, TCP_KEEPINTVL, kKeepAliveIntervalS);
  set_option(fd_.get(), IPPROTO_TCP, TCP_KEEPCNT, kKeepAliveProbes);
  may_lend_ = !stays_here(fd_.get());
}

Socket Socket::connect(const std::vector<SocketAddress>& addresses, const Limit& limit) {
  while (true) {
    int error = EADDRNOTAVAIL;
    bool waits = false;
    for (const SocketAddress& address : addresses) {
      Fd fd = new_socket(address);
      error = try_connect(fd.get(), address, limit);
      if (!error) return Socket(std::move(fd));
      waits |= error == EADDRNOTAVAIL && lacks_port(address);
    }
    if (!waits) throw LinkDown(connection_reason(error));
    if (limit.deadline.passed()) {
      throw Ended(limit.deadline.reason(kNoPorts).text, FailureKind::kExhausted);
    }
    limit.check();
    std::this_thread::sleep_for(kPortCheckEvery);
  }
}

void Socket::start_tls(const TlsContext& context, const std::string& host, const Limit& limit) {
  may_lend_ = false;
  tls_ = std::make_unique<TlsStream>(context, fd_.get(), host, limit);
}

void Socket::send(iovec* parts, size_t num_parts, const Limit& limit) {
  if (tls_) return tls_->send(parts, num_parts, limit);
  send_raw(parts, num_parts, 0, limit);
}

void Socket::send_raw(iovec* parts, size_t num_parts, int flags, const Limit& limit) {
  const auto wait = [&] { wait_writable(fd_.get(), limit); };
  move_all(parts, num_parts, limit, wait, [&](msghdr* message, bool more) {
    return sendmsg(fd_.get(), message, MSG_NOSIGNAL | flags | (more ? MSG_MORE : 0));
  });
}

void Socket::send_lent(iovec* parts, size_t num_parts, size_t first_lent, const Limit& limit) {
  if (!may_lend_) return send(parts, num_parts, limit);
  iovec* lent = parts + first_lent;
  size_t num_lent_parts = num_parts - first_lent;
  uint64_t num_bytes = 0;
  for (size_t i = 0; i < num_lent_parts; ++i) num_bytes += lent[i].iov_len;
  if (lends(num_bytes, num_lent_parts) && !zero_copy_) {
    zero_copy_ = ZeroCopy::make();
    may_lend_ = zero_copy_ != nullptr;
  }
  if (!lends(num_bytes, num_lent_parts)) return send(parts, num_parts, limit);
  const auto wait = [&] { wait_writable(fd_.get(), limit); };
  try {
    send_raw(parts, first_lent, MSG_MORE, limit);
    move_all(lent, num_lent_parts, limit, wait, [this](msghdr* message, bool more) {
      return zero_copy_->send(fd_.get(), *message, more ? MSG_MORE : 0);
    });
  } catch (const Inaccessible&) {
    take_back();
    throw Inaccessible(kNotThere, first_lent + 1);  // what precedes it has left
  } catch (...) {
    take_back();
    throw;
  }
}

bool Socket::lends(uint64_t num_bytes, size_t num_parts) const {
  return may_lend_ && num_bytes >= kMinLentBytes && num_bytes / num_parts >= kMinLentPartBytes;
}

void Socket::settle(uint64_t num_lent, const Limit& limit) {
  if (!zero_copy_) return;
  try {
    zero_copy_->settle(num_lent, limit);
  } catch (...) {
    take_back();
    throw;
  }
  may_lend_ = zero_copy_->works();
  if (!may_lend_ && zero_copy_->settled(zero_copy_->num_sent())) zero_copy_.reset();
}

// Resets the connection, if anything is lent: unlike by close(2), the kernel drops what it has not
// sent, even if a forked child has a copy of the descriptor. Then it waits for the NIC.
void Socket::take_back() noexcept {
  if (!zero_copy_ || zero_copy_->settled(zero_copy_->num_sent())) return;
  sockaddr none{};
  none.sa_family = AF_UNSPEC;
  ::connect(fd_.get(), &none, sizeof(none));
  zero_copy_->settle_all(Deadline::after(kNicS));
}

void Socket::receive(iovec* parts, size_t num_parts, const Limit& limit) {
  if (tls_) return tls_->receive(parts, num_parts, limit);
  receive_raw(parts, num_parts, 0, limit);
}

void Socket::drop(const iovec* parts, size_t num_parts, const Limit& limit) {
  uint64_t num_bytes = 0;
  for (size_t i = 0; i < num_parts; ++i) num_bytes += parts[i].iov_len;
  discard(num_bytes, limit);
}

void Socket::receive_raw(iovec* parts, size_t num_parts, int flags, const Limit& limit) {
  const auto wait = [&] { wait_for_bytes(limit); };
  try {
    move_all(parts, num_parts, limit, wait, [&](msghdr* message, bool) {
      const ssize_t received = recvmsg(fd_.get(), message, flags);
      if (received == 0) throw LinkDown(closed_by_peer());
      return received;
    });
  } catch (const Inaccessible&) {  // the kernel still has what it could not deliver
    drop(parts, num_parts, limit);
    throw;
  }
}

void Socket::send(const void* data, size_t num_bytes, const Limit& limit) {
  iovec part{const_cast<void*>(data), num_bytes};
  send(&part, num_bytes > 0, limit);
}

void Socket::receive(void* data, size_t num_bytes, const Limit& limit) {
  iovec part{data, num_bytes};
  receive(&part, num_bytes > 0, limit);
}

size_t Socket::receive_some(void* data, size_t num_bytes, const Limit& limit) {
  if (tls_) {
    receive(data, 1, limit);
    return 1;
  }
  while (true) {
    limit.check();
    const ssize_t received = recv(fd_.get(), data, num_bytes, 0);
    if (received > 0) return received;
    if (received == 0) throw LinkDown(closed_by_peer());
    if (errno == EAGAIN) {
      wait_for_bytes(limit);
    } else if (errno != EINTR) {
      throw LinkDown(connection_reason(errno));
    }
  }
}

void Socket::wait_for_bytes(const Limit& limit) const {
  const auto until = Deadline::Clock::now() + spin_;
  while (spin_.count() > 0 && Deadline::Clock::now() < until) {
    if (!is_silent()) return;
  }
  wait_readable(fd_.get(), limit);
}

void Socket::discard(uint64_t num_bytes, const Limit& limit) {
  std::array<char, 1 << 16> nowhere;
  while (num_bytes > 0) {
    const size_t step = std::min<uint64_t>(num_bytes, nowhere.size());
    receive(nowhere.data(), step, limit);
    num_bytes -= step;
  }
}

void Socket::send_fd(const Fd& fd, const Limit& limit) {
  FdMessage message;
  cmsghdr* const control = CMSG_FIRSTHDR(&message.header);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(sizeof(int));
  const int number = fd.get();
  std::memcpy(CMSG_DATA(control), &number, sizeof(number));
  exchange_message(fd_.get(), POLLOUT, limit,
                   [&] { return sendmsg(fd_.get(), &message.header, MSG_NOSIGNAL); });
}

Fd Socket::receive_fd(const Limit& limit) {
  FdMessage message;
  exchange_message(fd_.get(), POLLIN, limit,
                   [&] { return recvmsg(fd_.get(), &message.header, MSG_CMSG_CLOEXEC); });
  cmsghdr* const control = CMSG_FIRSTHDR(&message.header);
  std::vector<Fd> received;  // ours now, including unexpected ones
  if (control && control->cmsg_level == SOL_SOCKET && control->cmsg_type == SCM_RIGHTS) {
    received.resize((control->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    for (size_t i = 0; i < received.size(); ++i) {
      int number;
      std::memcpy(&number, CMSG_DATA(control) + i * sizeof(number), sizeof(number));
      received[i] = Fd(number);
    }
  }
  if (received.empty() && (message.header.msg_flags & MSG_CTRUNC)) {  // it came, and had no place
    throw SystemError(EMFILE, "receive a descriptor of the peer's memory");
  }
  if (received.size() != 1)
    throw Failure("protocol error: no descriptor", FailureKind::kIncompatible);
  return std::move(received[0]);
}

bool Socket::is_within_machine() const { return !is_tcp(fd_.get()); }

pid_t Socket::peer_process() const {
  ucred peer{};
  socklen_t num_bytes = sizeof(peer);
  if (getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &num_bytes) < 0) return 0;
  return is_own_user(peer.uid) ? peer.pid : 0;
}

std::optional<uid_t> Socket::peer_user() const { return transfer::peer_user(fd_); }

std::string Socket::peer_address() const {
  SocketAddress address{{}, sizeof(sockaddr_storage)};
  if (getpeername(fd_.get(), address.get(), &address.num_bytes) < 0) return "";
  return numeric_name(address);
}

unsigned char Socket::peek(const Limit& limit) {
  unsigned char byte;
  iovec part{&byte, 1};
  receive_raw(&part, 1, MSG_PEEK, limit);
  return byte;
}

void Socket::linger(const Limit& limit) noexcept {
  std::array<char, 1 << 12> nowhere;
  try {
    shutdown(fd_.get(), SHUT_WR);
    while (true) {
      iovec part{nowhere.data(), nowhere.size()};
      receive_raw(&part, 1, 0, limit);
    }
  } catch (const std::exception&) {
    // The peer has closed, or has had the time to.
  }
}

void Socket::close() noexcept {
  take_back();
  zero_copy_.reset();
  tls_.reset();
  shut_down(fd_);
}

bool Socket::at_rest() const { return fd_ && !(tls_ && tls_->has_pending()) && is_silent(); }

bool Socket::peer_has_left() const {
  pollfd polled{fd_.get(), POLLRDHUP, 0};
  return poll(&polled, 1, 0) > 0;
}

uint64_t Socket::num_bytes_here() const {
  int num_bytes = 0;
  return ioctl(fd_.get(), FIONREAD, &num_bytes) == 0 ? num_bytes : 0;
}

uint64_t Socket::num_bytes_room() const {
  int num_bytes = 0;  // of which the kernel needs up to half for itself
  socklen_t size = sizeof(num_bytes);
  return getsockopt(fd_.get(), SOL_SOCKET, SO_SNDBUF, &num_bytes, &size) == 0 ? num_bytes / 2 : 0;
}

void Socket::wake_from(uint64_t num_bytes) {
  const int least = static_cast<int>(std::min<uint64_t>(num_bytes, INT_MAX));
  setsockopt(fd_.get(), SOL_SOCKET, SO_RCVLOWAT, &least, sizeof(least));
}

bool Socket::is_silent() const {
  char byte;
  return recv(fd_.get(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
}

std::optional<uid_t> peer_user(const Fd& fd) {
  ucred peer{};
  socklen_t num_bytes = sizeof(peer);
  if (is_tcp(fd.get())) return std::nullopt;
  MK_SYSCALL(getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &peer, &num_bytes), "getsockopt");
  return peer.uid;
}

Fd bind_socket(const std::string& name, const std::vector<SocketAddress>& addresses, bool reuse) {
  int error = EADDRNOTAVAIL;
  for (const SocketAddress& address : addresses) {
    Fd fd = new_socket(address);
    set_option(fd.get(), SOL_SOCKET, SO_REUSEADDR, reuse);
    if (bind(fd.get(), address.get(), address.num_bytes) == 0) return fd;
    error = errno;
  }
  throw SystemError(error, "bind to " + name);
}

SocketAddress bound_address(const Fd& fd) {
  SocketAddress address{{}, sizeof(sockaddr_storage)};
  auto* const storage = reinterpret_cast<sockaddr*>(&address.storage);
  MK_SYSCALL(getsockname(fd.get(), storage, &address.num_bytes), "getsockname");
  return address;
}

uint16_t bound_port(const Fd& fd) {
  // The port is at the same offset in sockaddr_in and sockaddr_in6.
  const SocketAddress address = bound_address(fd);
  return ntohs(reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_port);
}

}  // namespace mk::transfer
