// RpcClient: it is closed while the pool takes one of its connections for another owner.
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "expect.h"
#include "transfer/peer/rpc_client.h"

using namespace mk::transfer;

namespace {

struct Seen {
  std::atomic<bool> slow{false};
  std::atomic<int> num_entered{0}, num_left{0};  // of disconnect()
};

// Responds to everything with nothing; leaves its peer slowly, if required.
class MadeUpChannel : public RpcChannel {
 public:
  explicit MadeUpChannel(Seen& seen) : seen_(seen) {}
  Transport transport() const override { return Transport::kTcp; }
  size_t window() const override { return 1; }
  uint64_t max_piece_bytes() const override { return 1; }
  void connect(const Limit&) override { connected_ = true; }
  void disconnect() noexcept override {
    ++seen_.num_entered;
    if (seen_.slow) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    connected_ = false;
    ++seen_.num_left;
  }
  bool connected() const override { return connected_; }
  void post(const Work&, const Limit&) override {}
  Outcome finish(const Limit&) override { return {}; }
  uint64_t call(const std::string&, std::vector<iovec>, const Limit&) override { return 0; }
  void receive_response(iovec*, size_t, const Limit&) override {}

 private:
  Seen& seen_;
  bool connected_ = false;
};

struct Stranger final : Connected {
  bool try_disconnect() override { return false; }
};

void a_connection_that_is_taken_away_is_waited_for() {
  Seen seen;
  const auto pool = std::make_shared<ConnectionPool>(1);
  auto client = std::make_shared<RpcClient>(
      "peer", [&] { return std::make_unique<MadeUpChannel>(seen); }, pool,
      std::make_shared<PeerCounters>());
  client->call({"ask", "?", {}, false}, Deadline::after(10));
  Stranger stranger;
  const int before = seen.num_entered;
  seen.slow = true;
  std::thread other([&] {
    Interrupt interrupt;
    pool->enter(stranger, {Deadline::after(10), interrupt});
  });
  while (seen.num_entered == before) {
  }
  client->close();
  EXPECT(seen.num_left > before);
  EXPECT(pool->size() <= 1);
  other.join();
  client.reset();
  EXPECT(pool->size() == 1);
  pool->leave(stranger);
}

}  // namespace

int main() {
  a_connection_that_is_taken_away_is_waited_for();
  return failures() != 0;
}
