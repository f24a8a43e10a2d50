// ShmChannel: the peer is on the same machine, and this process copies into and out of its memory.
//
// Layer: transfer. A connection within the machine, which tells the peer's regions and that it
// lives, and carries what cannot be reached: checks that fail, notifications, and data of regions
// that this process can neither map nor address. A copy into memory that is mapped would succeed
// after the peer's death: it counts only if the connection stands when it is over.
#pragma once

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "transfer/remote_memory.h"
#include "transfer/wire_channel.h"

namespace mk::transfer {

class ShmChannel : public WireChannel {
 public:
  // `addresses` are the peer's within_machine().
  using WireChannel::WireChannel;

  // Whether someone of the same user listens there; if not, why not.
  static bool reaches(const std::vector<SocketAddress>& addresses, std::string& why_not);

  Transport transport() const override { return Transport::kShm; }
  std::string path(size_t number) const override { return concat("shm:", number); }
  void connect(const Limit& limit) override;
  void disconnect() noexcept override;
  std::unique_ptr<Channel> another() const override {
    return std::make_unique<ShmChannel>(own_, host_, addresses_, identity_);
  }
  Way way_to(const Range& range) const override;
  bool runs_here() const override { return true; }
  std::optional<Outcome> run(const Work& work, const Limit& limit, Interrupt&) override;

 protected:
  void move(const Work& work, const Limit& limit) override;
  void check(const Work& work, const Limit& limit) override;
  void learn_regions(const Limit& limit);  // asks the peer

 private:
  bool copy(const Work& work, const Limit& limit, uint64_t& num_bytes_done);

  // Held by whoever copies: what it uses is not given back to the peer meanwhile.
  std::shared_mutex mutex_;
  std::shared_ptr<const RemoteMemory> remote_;  // null while not connected
  bool by_address_ = true;                      // until the machine says that it does not allow it

  // The leading thread's.
  uint64_t num_questions_ = 0;
  std::shared_ptr<const Board> board_;
  std::vector<std::shared_ptr<const SharedMemory>> memories_;
};

}  // namespace mk::transfer
