// ShmChannel: the peer is on the same machine, and this process copies into and out of its memory;
// that of another user, if it is admitted at all, goes over the connection.
//
// Layer: transfer. A connection within the machine lists the peer's regions, shows that it lives,
// and carries what cannot be accessed: checks that fail, notifications, and data of regions that
// this process can neither map nor address. A copy into mapped memory would succeed after the
// peer's death: it counts only if the peer still lives when it is done.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "transfer/channel/caller_driven.h"
#include "transfer/shm/remote_memory.h"
#include "transfer/tcp/tcp_channel.h"

namespace mk::transfer {

class ShmChannel : public TcpChannel, private RunsInCaller {
 public:
  // Paths that may be used. Without shm it is the transport cuda_ipc, which moves only GPU memory,
  // and not over a connection.
  struct Paths {
    bool shm;
    bool cuda_ipc;
  };

  // `addresses` are the peer's within_machine().
  ShmChannel(std::shared_ptr<const Endpoint> own, HostPort to, std::vector<SocketAddress> addresses,
             std::shared_ptr<PeerIdentity> identity, Paths paths)
      : TcpChannel(std::move(own), std::move(to), std::move(addresses), std::move(identity)),
        paths_(paths) {}

  // Whether a process listens there that this one may speak to, and that has what these ways need,
  // as far as is known without waiting; if not, why not.
  static bool reaches(const std::vector<SocketAddress>& addresses, const LocalUsers& users,
                      const Paths& paths, ErrorReason& why_not);

  Transport transport() const override {
    return paths_.shm ? Transport::kShm : Transport::kCudaIpc;
  }
  std::string path(size_t number) const override {
    return concat(paths_.shm ? "shm:" : "cuda_ipc:", number);
  }
  void count_in(PeerCounters& counters) override { counters_ = &counters; }
  void connect(const Limit& limit) override;
  void disconnect() noexcept override;
  void close() noexcept override;
  bool connected() const override;
  std::unique_ptr<Channel> another() const override {
    return std::make_unique<ShmChannel>(own_, to_, addresses_, identity_, paths_);
  }
  Path path_to(const Range& range, int device) const override;
  RunsInCaller* runs_in_caller() override { return this; }

 protected:
  void move(const Work& work, const Limit& limit) override;
  void check(const Work& work, const Limit& limit) override;
  void learn_regions(const Limit& limit);  // asks the peer
  bool may_know_more() const;              // whether asking it may tell of further regions

 private:
  std::optional<Outcome> run(const Work& work, const Limit& limit) override;
  bool maps_memory() const override { return maps_all_; }

  bool copy(const Work& work, const Limit& limit, GpuQueue* queue, Outcome& outcome,
            ErrorReason& why_not);
  void count(const Work& work, uint64_t num_gpu_bytes, Outcome& outcome);
  void learn_gpus(std::vector<RemoteMemory::Part>& parts, const Limit& limit);

  const Paths paths_;
  bool shares_ = false;               // the peer tells of its memory, and it may be used directly
  PeerCounters* counters_ = nullptr;  // null until count_in()

  // Held while copying: what the copy uses is not given back to the peer meanwhile.
  std::shared_mutex mutex_;
  std::shared_ptr<const RemoteMemory> remote_;  // null while not connected
  std::atomic<bool> maps_all_{false};           // that is known of the peer
  bool has_liveness_ = false;                   // its kernel has liveness word; set before remote_
  bool by_address_ = true;                      // until the machine turns out not to permit it

  // The leading thread's.
  size_t num_told_ = 0;  // regions, in the last answer
  std::chrono::steady_clock::time_point told_;
  std::shared_ptr<const ControlPage> page_;
  std::vector<std::shared_ptr<const SharedMemory>> memories_;
  std::vector<std::shared_ptr<GpuMapping>> gpus_;
  GpuQueue queue_;
};

}  // namespace mk::transfer
