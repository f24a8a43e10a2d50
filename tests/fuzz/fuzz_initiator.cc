// An initiator's handshake, and all that a request may consist of, with a target who answers
// anything; also to the request for its regions, and to one for its service.
#include <algorithm>
#include <memory>
#include <utility>

#include "fuzz.h"
#include "transfer/base/error.h"
#include "transfer/shm/shm_channel.h"

namespace mk::fuzz {
namespace {

constexpr uint8_t kHasSecret = 1;  // the initiator does
constexpr uint8_t kProves = 2;     // the target does, rightly, and welcomes
constexpr uint8_t kOwnHello = 4;   // all that the target says is the fuzzer's
constexpr uint8_t kReads = 8;      // what is asked for
constexpr uint8_t kIsLong = 16;    // in several batches
constexpr uint8_t kNotifies = 32;
constexpr uint8_t kIsShared = 64;  // by ShmChannel
constexpr uint8_t kLists = 128;    // asks for the list of regions first, the service, and checksums
constexpr double kLongS = 60;      // longer than libFuzzer waits

constexpr Range kLocal{Arena::kAddress + 0x4000, 0x3000};  // of more ranges than a batch may have

Request request(uint8_t mode) {
  Request request{};
  request.direction = mode & kReads ? Direction::kRead : Direction::kWrite;
  const size_t num_ranges = mode & kIsLong ? kMaxBatchRanges + 10 : 3;
  const size_t step = kLocal.num_bytes / num_ranges;
  for (size_t i = 0; i < num_ranges; ++i) {
    request.local.push_back(kLocal.address + i * step);
    request.remote.push_back(0x1000 + i * step);
    request.num_bytes += step;
  }
  request.sizes = {step};
  if (mode & kNotifies) request.notify = "done";
  request.verify = mode & kLists;
  return request;
}

void welcome(int fd, uint8_t mode) {
  Credentials credentials;
  if (mode & kHasSecret) credentials.secret = std::make_shared<const Secret>(secret());
  const Greeting mine = make_greeting(Endpoint("peer", "127.0.0.1:1", 77, credentials), {});
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

// On a connection that is there.
template <class Base>
class Adopting : public Base {
 public:
  template <class... Rest>
  Adopting(std::shared_ptr<const Endpoint> own, Socket socket, Rest... rest)
      : Base(std::move(own), {"peer", 1}, {},
             std::make_shared<PeerIdentity>(0, "", std::make_shared<LostLinksTable>()), rest...) {
    this->socket_ = std::move(socket);
  }
};

class Shared : public Adopting<ShmChannel> {
 public:
  using Adopting<ShmChannel>::Adopting;
  using ShmChannel::learn_regions;
};

void list_all(Channel& channel, const Limit& limit) {
  for (const auto& [range, rights, device] : channel.list_regions(limit)) {
    FUZZ_EXPECT(range.num_bytes > 0 && range.num_bytes <= UINT64_MAX - range.address);
    FUZZ_EXPECT(rights != 0 && !(rights & ~(kRemoteRead | kRemoteWrite)));
    FUZZ_EXPECT(device >= -1);
  }
}

void call(RpcChannel& channel, const Limit& limit) {
  std::string payload(64, 'p'), response(4096, '\0');
  uint64_t left = channel.call("a question", {{payload.data(), payload.size()}}, limit);
  FUZZ_EXPECT(left <= kMaxRpcResponseBytes);
  while (left > 0) {
    iovec part{response.data(), std::min<uint64_t>(left, response.size())};
    left -= part.iov_len;
    channel.receive_response(&part, 1, limit);
  }
}

uint64_t move_all(Channel& channel, const Request& request, const Limit& limit) {
  uint64_t num_bytes_done = 0;
  bool notify_begun = false;
  const auto run = [&](Work work) {
    work.notify_begun = &notify_begun;
    work.request = &request;
    work.request_id = 1;
    channel.post(work, limit);
    const Outcome outcome = channel.finish(limit);
    num_bytes_done += outcome.num_bytes;
    if (!outcome.refusal.empty()) throw Refused(outcome.refusal);
  };
  if (request.num_ranges() > kMaxBatchRanges) run({Work::Kind::kCheck});
  Cutter cutter(request, channel.max_piece_bytes());
  for (Piece piece; !cutter.at_end() && cutter.next(piece);) {
    run({Work::Kind::kMove, nullptr, 0, piece, request.notify && cutter.at_end()});
  }
  FUZZ_EXPECT(num_bytes_done == request.num_bytes);
  return num_bytes_done;
}

void initiate(Socket socket, std::shared_ptr<const Endpoint> own, const Request& request,
              bool is_shared, bool lists) {
  Interrupt interrupt;
  const Limit limit{Deadline::after(kLongS), interrupt};
  try {
    introduce(socket, *own, {5, 1}, {"peer", 1}, limit);
    if (is_shared) {
      Shared channel(std::move(own), std::move(socket), ShmChannel::Paths{true, true});
      channel.learn_regions(limit);
      move_all(channel, request, limit);
    } else {
      Adopting<TcpChannel> channel(std::move(own), std::move(socket));
      if (lists) {
        list_all(channel, limit);
        call(channel, limit);
      }
      move_all(channel, request, limit);
    }
  } catch (const Failure&) {
  } catch (const SystemError&) {  // of memory that the target has only told of
    FUZZ_EXPECT(is_shared);
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
  const auto own = std::make_shared<const Endpoint>("peer", "127.0.0.1:4711", 1, credentials);
  {
    Socket ours = player.start([=](int fd) {
      if (!(mode & kOwnHello)) welcome(fd, mode);
      say_all(fd, data + 1, num_bytes - 1);
    });
    initiate(std::move(ours), own, request(mode), mode & kIsShared, mode & kLists);
  }
  player.wait();
  FUZZ_EXPECT((mode & kReads) || Arena::is_untouched(kLocal));
  return 0;
}
