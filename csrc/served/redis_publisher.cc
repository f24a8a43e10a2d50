#include "served/redis_publisher.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <exception>
#include <stdexcept>

#include "common/check.h"

namespace mk::served {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kMaxErrorBytes = 512;  // of the server's text

void wait_for(int fd, short events, Clock::time_point until) {
  pollfd entry{fd, events, 0};
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
    if (left <= 0) throw std::runtime_error("it does not answer in time");
    const int found = poll(&entry, 1, static_cast<int>(left));
    if (found > 0) return;
    if (found < 0 && errno != EINTR) throw SystemError(errno, "poll");
  }
}

// Whether a call shall be repeated, once the connection is ready.
bool is_to_wait() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

void send_all(int fd, const std::string& data, Clock::time_point until) {
  for (size_t sent = 0; sent < data.size();) {
    const ssize_t count =
        send(fd, data.data() + sent, data.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count >= 0) {
      sent += static_cast<size_t>(count);
    } else if (is_to_wait()) {
      wait_for(fd, POLLOUT, until);
    } else {
      throw SystemError(errno, "send");
    }
  }
}

}  // namespace

std::optional<std::vector<bool>> RedisPublisher::publish(const std::vector<store::Key>& keys) {
  const size_t num_bytes = keys.size() * sizeof(store::Key);
  std::string command = concat(head_, "$", num_bytes, "\r\n");
  command.append(reinterpret_cast<const char*>(keys.data()), num_bytes).append("\r\n");
  const std::lock_guard lock(mutex_);
  if (!reason_.empty()) return std::nullopt;
  try {
    const std::string answer = ask(command, keys.size());
    std::vector<bool> listed(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) listed[i] = answer[i] == '\0';
    return listed;
  } catch (const std::exception& error) {
    fail(error.what());
    return std::nullopt;
  }
}

std::string RedisPublisher::reason() {
  const std::lock_guard lock(mutex_);
  pollfd entry{connection_.get(), POLLIN, 0};
  if (reason_.empty() && poll(&entry, 1, 0) > 0) fail("the server has closed the connection");
  return reason_;
}

void RedisPublisher::fail(const char* why) {
  reason_ = why;
  shutdown(connection_.get(), SHUT_RDWR);
}

// The string of so many bytes that the server answers; anything else is an exception.
std::string RedisPublisher::ask(const std::string& command, size_t num_bytes) {
  const auto until = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                        std::chrono::duration<double>(timeout_s_));
  const int fd = connection_.get();
  send_all(fd, command, until);
  const std::string begin = concat("$", num_bytes, "\r\n");
  const size_t expected = begin.size() + num_bytes + 2;
  std::string answer;
  const auto is_as_expected = [&] {
    const size_t known = std::min(answer.size(), begin.size());
    return answer.compare(0, known, begin, 0, known) == 0;
  };
  while (answer.size() < expected && is_as_expected()) {
    wait_for(fd, POLLIN, until);
    char buffer[4096];
    const ssize_t count = recv(fd, buffer, sizeof(buffer), MSG_DONTWAIT);
    if (count > 0) {
      answer.append(buffer, static_cast<size_t>(count));
    } else if (count == 0) {
      throw std::runtime_error("the server has closed the connection");
    } else if (!is_to_wait()) {
      throw SystemError(errno, "recv");
    }
  }
  if (answer.size() != expected || !is_as_expected()) {
    throw std::runtime_error(concat("unexpected answer: ", answer.substr(0, kMaxErrorBytes)));
  }
  return answer.substr(begin.size(), num_bytes);
}

}  // namespace mk::served
