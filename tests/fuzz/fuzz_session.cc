// A whole Session, from the first byte of a connection on, with an initiator who says anything.
#include "fuzz.h"
#include "transfer/session.h"

namespace mk::fuzz {
namespace {

constexpr uint8_t kHasSecret = 1;  // the target does
constexpr uint8_t kProves = 2;     // the initiator does, rightly; else the proof is the fuzzer's
constexpr uint8_t kOwnHello = 4;   // the Hello, too, is the fuzzer's
constexpr uint64_t kInstance = 77;

// As in seeds.py. The first two lie side by side: no range may reach from one into the other.
constexpr Range kReadWrite{Arena::kAddress + 0x4000, 0x1000};
constexpr Range kReadOnly{Arena::kAddress + 0x5000, 0x1000};
constexpr Range kWriteOnly{Arena::kAddress + 0x8010, 0x0FF1};

Endpoint& endpoint(bool has_secret) {
  const auto make = [](bool with_secret) {
    Credentials credentials;
    if (with_secret) credentials.secret = std::make_shared<const Secret>(secret());
    auto* const made = new Endpoint("peer", "127.0.0.1:4711", 1, credentials);
    made->regions.add({kReadWrite, kLocalWrite | kRemoteRead | kRemoteWrite});
    made->regions.add({kReadOnly, kLocalWrite | kRemoteRead});
    made->regions.add({kWriteOnly, kLocalWrite | kRemoteWrite});
    return made;
  };
  static Endpoint* const endpoints[] = {make(false), make(true)};
  return *endpoints[has_secret];
}

void prove(int fd, const Greeting& mine) {
  Greeting theirs;
  if (!hear_greeting(fd, theirs)) return;
  const Bytes32 proof = secret().prove(Side::kInitiator, {}, mine.bytes(), theirs.bytes());
  send(fd, proof.data(), proof.size(), MSG_NOSIGNAL);
}

void play_initiator(int fd, uint8_t mode, const uint8_t* data, size_t num_bytes) {
  if (!(mode & kOwnHello)) {
    Credentials credentials;
    if (mode & kHasSecret) credentials.secret = std::make_shared<const Secret>(secret());
    const Greeting mine =
        make_greeting(Endpoint("peer", "127.0.0.1:1", kInstance, credentials), {5, 1});
    const std::string bytes = mine.bytes();
    send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if ((mode & kHasSecret) && (mode & kProves)) prove(fd, mine);
  }
  say_all(fd, data, num_bytes);
}

}  // namespace
}  // namespace mk::fuzz

using namespace mk::fuzz;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  static Arena arena;
  static Player& player = *new Player;  // its thread outlives main
  if (num_bytes == 0) return 0;
  const uint8_t mode = *data;
  for (const Range& range : {kReadWrite, kReadOnly, kWriteOnly}) Arena::allow(range);
  Arena::restore(kReadWrite);
  Arena::hide(kWriteOnly);
  Endpoint& own = endpoint(mode & kHasSecret);
  Gate gate;
  {
    Socket ours = player.start([=](int fd) { play_initiator(fd, mode, data + 1, num_bytes - 1); });
    Session(own, gate, *gate.admission.enter("peer"), std::move(ours)).run();
  }
  player.wait();
  FUZZ_EXPECT(Arena::is_untouched(kReadOnly));
  own.notifications.take(Deadline::after(0));
  return 0;
}
