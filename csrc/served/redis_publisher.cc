#include "served/redis_publisher.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <stdexcept>
#include <utility>

#include "common/check.h"
#include "served/object_wire.h"

namespace mk::served {
namespace {

using Time = std::chrono::steady_clock::time_point;
using std::chrono::milliseconds;

constexpr size_t kMaxErrorBytes = 512;  // of the server's text
constexpr double kMaxTimeoutS = 3600;
constexpr char kListed = 0, kRefused = 1;

struct Late : std::runtime_error {
  Late() : std::runtime_error("it does not answer in time") {}
};

void wait_for(int fd, short events, Time until) {
  pollfd entry{fd, events, 0};
  for (;;) {
    const auto now = std::chrono::steady_clock::now();
    const auto left = std::chrono::ceil<milliseconds>(until - now).count();
    if (left <= 0) throw Late();
    const int found = poll(&entry, 1, static_cast<int>(left));
    if (found > 0) return;
    if (found < 0 && errno != EINTR) throw SystemError(errno, "poll");
  }
}

// Whether a call shall be repeated, once the connection is ready.
bool is_to_wait() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

void send_all(int fd, const std::string& data, Time until) {
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

void append_word(std::string& command, const char* data, size_t num_bytes) {
  command += concat("$", num_bytes, "\r\n");
  command.append(data, num_bytes).append("\r\n");
}

}  // namespace

RedisPublisher::RedisPublisher(Fd connection, std::string head, double timeout_s, int64_t clock_ms)
    : connection_(std::move(connection)),
      head_(std::move(head)),
      timeout_(milliseconds(
          timeout_s > 0 && timeout_s <= kMaxTimeoutS ? static_cast<int64_t>(timeout_s * 1000) : 0)),
      clock_ms_(clock_ms) {
  MK_CHECK(timeout_ > timeout_.zero(), "RedisPublisher: timeout_s must be above 0, up to ",
           kMaxTimeoutS, ", got ", timeout_s);
}

std::optional<std::vector<bool>> RedisPublisher::publish(const std::vector<store::Key>& keys) {
  MK_CHECK(keys.size() <= kMaxRequestKeys, "publish: keys must be at most ", kMaxRequestKeys,
           ", got ", keys.size());
  if (keys.empty()) return std::vector<bool>{};
  Call call{keys};
  std::unique_lock lock(mutex_);
  waiting_.push_back(&call);
  changed_.wait(lock, [&] { return call.is_over || !is_asking_; });
  while (!call.is_over) {  // this thread asks for all that wait, until it has its own answer
    const std::vector<Call*> calls = take_calls();
    std::vector<store::Key> all;
    for (const Call* each : calls) all.insert(all.end(), each->keys.begin(), each->keys.end());
    std::vector<bool> listed;
    std::string why;
    bool is_late = false;
    if (reason_.empty()) {
      is_asking_ = true;
      lock.unlock();
      try {
        listed = ask(all);
      } catch (const std::exception& error) {
        why = error.what();
        is_late = dynamic_cast<const Late*>(&error) != nullptr;
      }
      lock.lock();
      is_asking_ = false;
      if (!why.empty()) fail(why.c_str(), is_late);
    }
    auto first = listed.begin();
    for (Call* each : calls) {
      const auto end = first + static_cast<ptrdiff_t>(listed.empty() ? 0 : each->keys.size());
      if (reason_.empty()) each->listed.emplace(first, end);
      first = end;
      each->is_over = true;
    }
    changed_.notify_all();
  }
  return std::move(call.listed);
}

// The first of those that wait, as many as fit into a question.
std::vector<RedisPublisher::Call*> RedisPublisher::take_calls() {
  std::vector<Call*> calls;
  size_t num_keys = 0;
  while (!waiting_.empty()) {
    num_keys += waiting_.front()->keys.size();
    if (num_keys > kMaxRequestKeys) break;
    calls.push_back(waiting_.front());
    waiting_.pop_front();
  }
  return calls;
}

std::string RedisPublisher::reason() {
  const std::lock_guard lock(mutex_);
  pollfd entry{connection_.get(), POLLIN, 0};
  if (reason_.empty() && !is_asking_ && poll(&entry, 1, 0) > 0) {
    fail("the server has closed the connection");
  }
  return reason_;
}

bool RedisPublisher::is_late() const {
  const std::lock_guard lock(mutex_);
  return is_late_;
}

void RedisPublisher::fail(const char* why, bool is_late) {
  reason_ = why;
  is_late_ = is_late;
  shutdown(connection_.get(), SHUT_RDWR);
}

std::vector<bool> RedisPublisher::ask(const std::vector<store::Key>& keys) const {
  const Time now = Clock::now(), until = now + timeout_;
  const auto valid_until =
      std::chrono::duration_cast<milliseconds>(now.time_since_epoch() + timeout_ * 3 / 4);
  std::string command = head_;
  const std::string server_ms = std::to_string(clock_ms_ + valid_until.count());
  append_word(command, server_ms.data(), server_ms.size());
  append_word(command, reinterpret_cast<const char*>(keys.data()), keys.size() * sizeof(keys[0]));
  const int fd = connection_.get();
  send_all(fd, command, until);

  const std::string begin = concat("$", keys.size(), "\r\n");
  const size_t expected = begin.size() + keys.size() + 2;
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
  std::vector<bool> listed;
  bool is_known = answer.size() == expected && is_as_expected();
  for (size_t i = 0; is_known && i < keys.size(); ++i) {
    const char byte = answer[begin.size() + i];
    is_known = byte == kListed || byte == kRefused;
    listed.push_back(byte == kListed);
  }
  if (!is_known) {
    throw std::runtime_error(concat("unexpected answer: ", answer.substr(0, kMaxErrorBytes)));
  }
  return listed;
}

}  // namespace mk::served
