// A whole Session, from the first byte of a connection on, with an initiator who says anything,
// also to a service that answers for the objects of a pool.
#include "fuzz.h"
#include "served/object_service.h"
#include "store/objects.h"
#include "transfer/server/session.h"

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

// A pool that is served, of which no one gets to see more than its objects.
class Served {
 public:
  explicit Served(const served::ObjectService::Options& options)
      : pool_(store::Pool::create("", store::Geometry::of(kCapacity, 64, 8, 1, 4))),
        service_(std::make_shared<served::ObjectService>(pool_, options)) {
    fill();
  }

  const std::shared_ptr<served::ObjectService>& service() const { return service_; }

  // Nothing is held when the session is over. What may have been changed is made good.
  void check() {
    const store::PoolStats stats = pool_->stats();
    FUZZ_EXPECT(stats.num_pins == 0 && stats.num_writing == 0 && stats.num_doomed == 0);
    service_->take_done();
    const store::PoolCounts counts = pool_->counts();
    if (counts.num_stored + counts.num_removed != num_changes_) fill();
  }

 private:
  static constexpr uint64_t kCapacity = 8 << 10;

  // As in seeds.py: one with a checksum, one without, one that differs from its own, an empty one.
  void fill() {
    for (const store::ObjectInfo& object : pool_->scan()) pool_->remove(object.key);
    Arena::hide({reinterpret_cast<uint64_t>(pool_->data()), kCapacity});
    std::string bytes(4096, 'o');
    put({1, 0}, {{bytes.data(), 100}}, true);
    put({2, 0}, {{bytes.data(), 4096}}, false);
    put({3, 0}, {{bytes.data(), 64}}, true);
    put({4, 0}, {}, true);
    const store::Pin damaged = *pool_->pin({3, 0});
    const_cast<char*>(damaged.data)[7] = 'x';
    pool_->unpin(damaged);
    const store::PoolCounts counts = pool_->counts();
    num_changes_ = counts.num_stored + counts.num_removed;
  }

  void put(const store::Key& key, const store::Pieces& pieces, bool checksum) {
    const store::PutOptions options{checksum, store::Retention::kNormal};
    FUZZ_EXPECT(store::put_from(pool_.get(), key, pieces, options) == store::PutState::kOpen);
  }

  const std::shared_ptr<store::Pool> pool_;
  const std::shared_ptr<served::ObjectService> service_;
  uint64_t num_changes_ = 0;  // when it was last filled
};

// Of the endpoint without a secret all may be changed.
Served& served(bool has_secret) {
  static Served* const all[] = {new Served({true, true, true}), new Served({false, false, false})};
  return *all[has_secret];
}

Endpoint& endpoint(bool has_secret) {
  const auto make = [](bool with_secret) {
    Credentials credentials;
    if (with_secret) credentials.secret = std::make_shared<const Secret>(secret());
    auto* const made = new Endpoint("peer", "127.0.0.1:4711", 1, credentials);
    made->regions.add({kReadWrite, kLocalWrite | kRemoteRead | kRemoteWrite});
    made->regions.add({kReadOnly, kLocalWrite | kRemoteRead});
    made->regions.add({kWriteOnly, kLocalWrite | kRemoteWrite});
    made->service.set(served(with_secret).service());
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
  served(mode & kHasSecret).check();
  own.notifications.take(Deadline::after(0));
  return 0;
}
