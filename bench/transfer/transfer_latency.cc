// What one small request takes in C++, from submit() to the end of its wait, with nothing else to
// do: `transfer_latency tcp|shm|shm-mapped|local <bytes> <requests> <spin_us>` prints, for writes
// and reads, the median and the 90th percentile in microseconds. bench_latency.py builds and runs
// it.
#include <sys/prctl.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "common/shared_memory.h"
#include "transfer/engine/engine.h"

using namespace mk;
using namespace mk::transfer;

namespace {

constexpr uint64_t kRegionBytes = 1 << 20;
constexpr double kDeadlineS = 30;

std::chrono::microseconds spin{0};

EngineOptions options_for(const std::string& transport) {
  EngineOptions options{};
  options.listen = "127.0.0.1:0";
  options.local = transport == "local";
  options.shm = transport == "shm" || transport == "shm-mapped";
  options.tcp = transport == "tcp";
  options.num_lanes = 2;
  options.max_connections = 512;
  options.spin = spin;
  return options;
}

// Memory that a peer of this machine can map, or not.
struct Memory {
  explicit Memory(bool mapped) {
    if (mapped) shared = std::make_unique<SharedMemory>(kRegionBytes);
    if (!mapped) plain.resize(kRegionBytes);
  }
  Range range() {
    char* const data = shared ? shared->data() : plain.data();
    return {reinterpret_cast<uint64_t>(data), kRegionBytes};
  }
  std::unique_ptr<SharedMemory> shared;
  std::vector<char> plain;
};

constexpr Rights kAll = kLocalWrite | kRemoteRead | kRemoteWrite;

struct Offered {
  char address[64];
  uint64_t memory;
};

Offered offer(Engine& engine, Memory& memory) {
  Offered made{};
  std::snprintf(made.address, sizeof(made.address), "%s", engine.address().c_str());
  made.memory = memory.range().address;
  std::memset(reinterpret_cast<void*>(made.memory), 1, kRegionBytes);
  engine.add_region(memory.range(), kAll, /*device=*/-1);
  return made;
}

[[noreturn]] void serve(const std::string& transport, int pipe) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  Memory memory(transport == "shm-mapped");
  Engine engine(options_for(transport));
  const Offered made = offer(engine, memory);
  if (write(pipe, &made, sizeof(made)) != sizeof(made)) std::_Exit(1);
  while (true) pause();
}

Request request(Direction direction, uint64_t local, uint64_t remote, uint64_t num_bytes) {
  Request request{};
  request.direction = direction;
  request.local = {local};
  request.remote = {remote};
  request.sizes = {num_bytes};
  request.num_bytes = num_bytes;
  return request;
}

void measure(const char* what, int count, Engine& engine, Peer& peer, const Request& asked) {
  std::vector<double> us(count);
  for (int i = -count / 10; i < count; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    const TicketRef ticket = engine.submit(peer, asked, kDeadlineS);
    if (ticket) ticket->wait(Deadline::never());
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    if (ticket) ticket->check();
    us[std::max(i, 0)] = took.count();
  }
  std::sort(us.begin(), us.end());
  std::printf("%s %.3f %.3f\n", what, us[count / 2], us[count * 9 / 10]);
}

}  // namespace

int main(int, char** arguments) {
  const std::string transport = arguments[1];
  const uint64_t num_bytes = std::strtoull(arguments[2], nullptr, 10);
  const int count = std::atoi(arguments[3]);
  spin = std::chrono::microseconds(std::atoi(arguments[4]));
  int pipes[2];
  if (pipe(pipes) != 0) return 1;
  const pid_t child = transport == "local" ? 0 : fork();  // before there are threads
  if (transport != "local" && child == 0) serve(transport, pipes[1]);
  Memory memory(false), other(false);
  Engine engine(options_for(transport));
  engine.add_region(memory.range(), kAll, /*device=*/-1);
  std::unique_ptr<Engine> target;
  Offered offered;
  if (child == 0) {
    target = std::make_unique<Engine>(options_for(transport));
    offered = offer(*target, other);
  } else if (read(pipes[0], &offered, sizeof(offered)) != sizeof(offered)) {
    return 1;
  }
  const PeerRef peer = engine.open({offered.address, offered.address, 0}, kDeadlineS);
  peer->wait_connected(Deadline::after(kDeadlineS));
  const uint64_t here = memory.range().address;
  measure("write", count, engine, *peer,
          request(Direction::kWrite, here, offered.memory, num_bytes));
  measure("read", count, engine, *peer, request(Direction::kRead, here, offered.memory, num_bytes));
  engine.close();
  if (child != 0) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
  return 0;
}
