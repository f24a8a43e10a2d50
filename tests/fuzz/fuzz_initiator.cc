// An initiator's handshake and exchange, with a target who answers anything.
#include <vector>

#include "fuzz.h"
#include "transfer/error.h"
#include "transfer/exchange.h"

namespace mk::fuzz {
namespace {

constexpr uint8_t kHasSecret = 1;  // the initiator does
constexpr uint8_t kProves = 2;     // the target does, rightly, and welcomes
constexpr uint8_t kOwnHello = 4;   // all that the target says is the fuzzer's
constexpr uint8_t kReads = 8;      // what is asked for
constexpr uint8_t kIsLong = 16;    // in several batches
constexpr uint8_t kNotifies = 32;
constexpr double kLongS = 60;  // longer than libFuzzer waits

constexpr Range kLocal{Arena::kAddress + 0x4000, 0x3000};  // of more ranges than a batch may have

Request request(uint8_t mode) {
  Request request{};
  request.direction = mode & kReads ? Direction::kRead : Direction::kWrite;
  const size_t num_ranges = mode & kIsLong ? kMaxBatchRanges + 10 : 3;
  const size_t step = kLocal.num_bytes / num_ranges;
  for (size_t i = 0; i < num_ranges; ++i) {
    request.local.push_back({kLocal.address + i * step, step});
    request.remote.push_back({0x1000 + i * step, step});
    request.num_bytes += step;
  }
  if (mode & kNotifies) request.notify = "done";
  return request;
}

void welcome(int fd, uint8_t mode) {
  Credentials credentials;
  if (mode & kHasSecret) credentials.secret = std::make_shared<const Secret>(secret());
  const Greeting mine = make_greeting(Endpoint("127.0.0.1:1", 77, credentials), {});
  Greeting theirs;
  if (!hear_greeting(fd, theirs)) return;
  const std::string bytes = mine.bytes();
  send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  if (!(mode & kProves)) return;
  Welcome welcome{};
  if (mode & kHasSecret) {
    Bytes32 proof;
    if (!hear(fd, proof.data(), proof.size())) return;
    welcome.proof = secret().prove(Side::kTarget, {}, theirs.bytes(), mine.bytes());
  }
  send(fd, &welcome, sizeof(welcome), MSG_NOSIGNAL);
}

void initiate(Socket& socket, const Endpoint& own, const Request& request) {
  const Interrupt interrupt;
  const Limit limit{Deadline::after(kLongS), interrupt};
  uint64_t num_bytes_done = 0;
  try {
    introduce(socket, own, {5, 1}, "peer", limit);
    Exchange(socket, request, 1, limit, num_bytes_done).run();
    FUZZ_EXPECT(num_bytes_done == request.num_bytes);
  } catch (const Failure&) {
    FUZZ_EXPECT(num_bytes_done <= request.num_bytes);
  }
}

}  // namespace
}  // namespace mk::fuzz

using namespace mk::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  static Arena arena;
  static Player& player = *new Player;  // its thread outlives main
  if (num_bytes == 0) return 0;
  const uint8_t mode = *data;
  Arena::allow(kLocal);
  Arena::restore(kLocal);
  Credentials credentials;
  if (mode & kHasSecret) credentials.secret = std::make_shared<const Secret>(secret());
  const Endpoint own("127.0.0.1:4711", 1, credentials);
  {
    Socket ours = player.start([=](int fd) {
      if (!(mode & kOwnHello)) welcome(fd, mode);
      say_all(fd, data + 1, num_bytes - 1);
    });
    initiate(ours, own, request(mode));
  }
  player.wait();
  FUZZ_EXPECT((mode & kReads) || Arena::is_untouched(kLocal));
  return 0;
}
