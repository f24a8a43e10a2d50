// ZeroCopy and Socket over loopback, between two of its addresses, which count as two machines. The
// kernel copies there after all, when the bytes arrive, and says so.
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/utsname.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#include "expect.h"
#include "transfer/net/socket.h"

using namespace mk;
using namespace mk::transfer;

namespace {

constexpr double kLongS = 30;
constexpr size_t kMuch = 16 << 20;       // more than the buffers of both ends hold
constexpr size_t kBuffered = 512 << 10;  // fits the sender's, and not the receiver's

std::vector<char> content(size_t num_bytes) {
  std::vector<char> bytes(num_bytes);
  for (size_t i = 0; i < num_bytes; ++i) bytes[i] = static_cast<char>(i ^ i >> 8 ^ i >> 16);
  return bytes;
}

// Two ends of a connection to 127.0.0.2.
std::pair<Fd, Fd> connected(const char* from) {
  const Fd listening = bind_socket("here", resolve({"127.0.0.2", 0}), true);
  EXPECT(listen(listening.get(), 1) == 0);
  fcntl(listening.get(), F_SETFL, 0);
  Fd near(socket(AF_INET, SOCK_STREAM, 0));
  const SocketAddress source = resolve({from, 0})[0], target = bound_address(listening);
  EXPECT(bind(near.get(), source.get(), source.num_bytes) == 0);
  EXPECT(connect(near.get(), target.get(), target.num_bytes) == 0);
  Fd far(accept(listening.get(), nullptr, nullptr));
  const timeval limit{10, 0};  // of a read that should have ended
  setsockopt(far.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  return {std::move(near), std::move(far)};
}

std::vector<char> read_all(const Fd& fd, size_t most) {
  std::vector<char> bytes(most);
  size_t num_bytes = 0;
  for (ssize_t n; num_bytes < most; num_bytes += n) {
    n = recv(fd.get(), bytes.data() + num_bytes, most - num_bytes, 0);
    if (n <= 0) break;
  }
  bytes.resize(num_bytes);
  return bytes;
}

struct Both {
  explicit Both(const char* from = "127.0.0.1") : Both(connected(from)) {}
  explicit Both(std::pair<Fd, Fd> ends)
      : near(std::move(ends.first)), far(std::move(ends.second)) {}

  void send(std::vector<char>& head, std::vector<char>& bytes, const Deadline& until,
            size_t num_parts = 1) {
    std::vector<iovec> parts{{head.data(), head.size()}};
    for (size_t i = 0; i < num_parts; ++i) {
      const size_t size = bytes.size() / num_parts;
      parts.push_back({bytes.data() + i * size, size});
    }
    near.send_lent(parts.data(), parts.size(), 1, {until, interrupt});
  }

  Socket near;
  Fd far;
  Interrupt interrupt;
};

void what_is_lent_arrives_and_is_given_back() {
  Both both;
  std::vector<char> head = content(100), bytes = content(kMuch), received;
  std::thread reader([&] { received = read_all(both.far, head.size() + kMuch); });
  both.send(head, bytes, Deadline::after(kLongS), 64);
  EXPECT(both.near.num_lent() > 0);
  const uint64_t mark = both.near.num_lent();
  both.near.settle(mark, {Deadline::after(kLongS), both.interrupt});
  reader.join();
  EXPECT(std::equal(head.begin(), head.end(), received.begin()));
  EXPECT(std::equal(bytes.begin(), bytes.end(), received.begin() + 100));
  EXPECT(!both.near.lends(kMuch, 1));  // for it was copied
  received.clear();
  std::thread again([&] { received = read_all(both.far, head.size() + kMuch); });
  both.send(head, bytes, Deadline::after(kLongS));
  again.join();
  EXPECT(both.near.num_lent() == 0);
  EXPECT(std::equal(bytes.begin(), bytes.end(), received.begin() + 100));
}

void little_is_not_lent() {
  for (const auto& [num_bytes, num_parts] :
       {std::pair<size_t, size_t>(256 << 10, 17), {(256 << 10) - 1, 1}}) {
    Both both;
    std::vector<char> head = content(100), bytes = content(num_bytes), received;
    std::thread reader([&, size = num_bytes / num_parts * num_parts] {
      received = read_all(both.far, 100 + size);
    });
    both.send(head, bytes, Deadline::after(kLongS), num_parts);
    reader.join();
    EXPECT(both.near.num_lent() == 0);
    EXPECT(both.near.lends(256 << 10, 16));
  }
}

void nothing_is_lent_to_the_same_address() {
  Both both("127.0.0.2");
  std::vector<char> head = content(100), bytes = content(kMuch), received;
  std::thread reader([&] { received = read_all(both.far, 100 + kMuch); });
  both.send(head, bytes, Deadline::after(kLongS));
  reader.join();
  EXPECT(both.near.num_lent() == 0);
  EXPECT(received.size() == 100 + kMuch);
}

// Of a send that is given up no byte leaves that is written to its memory later, even if a forked
// child keeps the connection open.
template <class GiveUp>
void what_is_given_up_does_not_leave(size_t num_bytes, GiveUp give_up) {
  Both both;
  const Fd of_child(dup(both.near.fd()));
  std::vector<char> head(100), bytes(num_bytes, 'a');
  give_up(both, head, bytes);
  std::memset(bytes.data(), 'b', bytes.size());
  const std::vector<char> received = read_all(both.far, 2 * kMuch);  // to its end
  EXPECT(received.size() > 100 && received.size() < num_bytes);
  EXPECT(std::count(received.begin() + 100, received.end(), 'a') ==
         static_cast<ptrdiff_t>(received.size() - 100));
}

void sending(Both& both, std::vector<char>& head, std::vector<char>& bytes) {
  try {
    both.send(head, bytes, Deadline::after(0.1));
    EXPECT(false);
  } catch (const Ended&) {
  }
}

// All of it is in the kernel's hands, but has not left.
void settling(Both& both, std::vector<char>& head, std::vector<char>& bytes) {
  both.send(head, bytes, Deadline::after(kLongS));
  try {
    both.near.settle(both.near.num_lent(), {Deadline::after(0.1), both.interrupt});
    EXPECT(false);
  } catch (const Ended&) {
  }
}

void closing(Both& both, std::vector<char>& head, std::vector<char>& bytes) {
  both.send(head, bytes, Deadline::after(kLongS));
  both.near.close();
}

// A full buffer is EAGAIN, after which more can be sent; the notification of such a send says that
// its bytes were copied, but there were none.
void a_full_buffer_is_not_a_copy() {
  auto [near, far] = connected("127.0.0.1");
  std::vector<char> bytes = content(kMuch);
  ZeroCopy zero_copy;
  iovec part{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  const ssize_t first = zero_copy.send(near.get(), message, 0);
  EXPECT(first > 0 && first < static_cast<ssize_t>(kMuch));
  while (zero_copy.send(near.get(), message, 0) > 0) {
  }
  EXPECT(errno == EAGAIN);
  EXPECT(zero_copy.send(near.get(), message, 0) < 0 && errno == EAGAIN);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const uint64_t mark = zero_copy.num_sent();
  if (zero_copy.settled(mark)) return;  // all was copied: this user may lock too little memory
  EXPECT(zero_copy.works());
  near.close();
  far.close();
  zero_copy.settle_all(Deadline::after(kLongS));
  EXPECT(zero_copy.settled(mark));
}

bool is_available() {
  utsname kernel{};
  uname(&kernel);
  int major = 0, minor = 0;
  std::sscanf(kernel.release, "%d.%d", &major, &minor);
  return std::pair(major, minor) >= std::pair(6, 2) && ZeroCopy::make();
}

}  // namespace

int main() {
  nothing_is_lent_to_the_same_address();
  if (!is_available()) {
    std::puts("the kernel, or a container, does not allow it");
    return failures() != 0;
  }
  what_is_lent_arrives_and_is_given_back();
  little_is_not_lent();
  what_is_given_up_does_not_leave(kMuch, sending);
  what_is_given_up_does_not_leave(kBuffered, settling);
  what_is_given_up_does_not_leave(kBuffered, closing);
  a_full_buffer_is_not_a_copy();
  return failures() != 0;
}
