#include "fuzz.h"

#include <poll.h>

#include <cerrno>

#include "transfer/base/random.h"

namespace mk::fuzz {
namespace {

// Compared by hand, for the fuzzer learns from what it sees memcmp look for.
uint64_t hidden_word() {
  static const uint64_t word = random_value<uint64_t>();
  return word;
}

bool holds_hidden_word(const char* data, size_t num_bytes) {
  for (size_t i = 0; i + sizeof(uint64_t) <= num_bytes; ++i) {
    uint64_t word;
    std::memcpy(&word, data + i, sizeof(word));
    if (word == hidden_word()) return true;
  }
  return false;
}

}  // namespace

void Arena::hide(const Range& range) {
  const uint64_t word = hidden_word();
  for (uint64_t at = 0; at < range.num_bytes; ++at) {
    reinterpret_cast<char*>(range.address)[at] =
        reinterpret_cast<const char*>(&word)[at % sizeof(word)];
  }
}

Socket Player::start(std::function<void(int)> part) {
  int fds[2];
  FUZZ_EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
  Socket ours{Fd(fds[0])};
  const std::lock_guard lock(mutex_);
  part_ = std::move(part);
  fd_ = fds[1];
  changed_.notify_all();
  return ours;
}

void Player::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return fd_ < 0; });
}

void Player::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return fd_ >= 0; });
    lock.unlock();
    part_(fd_);
    close(fd_);
    lock.lock();
    fd_ = -1;
    changed_.notify_all();
  }
}

void say_all(int fd, const uint8_t* data, size_t num_bytes) {
  char nowhere[1 << 16];
  while (true) {
    if (num_bytes == 0) shutdown(fd, SHUT_WR);
    pollfd polled{fd, static_cast<short>(POLLIN | (num_bytes > 0 ? POLLOUT : 0)), 0};
    poll(&polled, 1, -1);
    if (polled.revents & POLLOUT) {
      const ssize_t sent = send(fd, data, num_bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (sent < 0 && errno != EAGAIN) num_bytes = 0;
      if (sent > 0) {
        data += sent;
        num_bytes -= sent;
      }
    }
    if (polled.revents & (POLLIN | POLLHUP)) {
      const ssize_t received = recv(fd, nowhere, sizeof(nowhere), MSG_DONTWAIT);
      FUZZ_EXPECT(received <= 0 || !holds_hidden_word(nowhere, received));
      if (received == 0 || (received < 0 && errno != EAGAIN)) return;
    }
  }
}

bool hear(int fd, void* data, size_t num_bytes) {
  if (num_bytes == 0) return true;  // for nothing, recv() would wait
  return recv(fd, data, num_bytes, MSG_WAITALL) == static_cast<ssize_t>(num_bytes);
}

bool hear_greeting(int fd, Greeting& greeting) {
  if (!hear(fd, &greeting.hello, sizeof(greeting.hello))) return false;
  greeting.name.resize(greeting.hello.name_bytes);
  if (!hear(fd, greeting.name.data(), greeting.name.size()) ||
      !hear(fd, &greeting.tail, sizeof(greeting.tail))) {
    return false;
  }
  greeting.dialled.resize(greeting.tail.dialled_bytes);
  greeting.reached.resize(greeting.tail.reached_bytes);
  return hear(fd, greeting.dialled.data(), greeting.dialled.size()) &&
         hear(fd, greeting.reached.data(), greeting.reached.size());
}

}  // namespace mk::fuzz
