// Admission: limits how many connections a server has at a time. Strangers, which have not yet
// authenticated, are counted separately, so that they cannot take the places of peers; and no host
// or user of this machine has more than half of either. Where there is no place left, a newcomer
// takes that of a stranger: of the host with the most of them, the oldest that has said nothing,
// or, if few have said nothing, any that has begun to speak. A new peer takes the place of one that
// has proved nothing and has been idle the longest, and long enough.
//
//   std::optional<Admission::Visit> visit = admission.enter(host_of(address));   // or nothing
//   visit->may_be_ended(interrupt);
//   visit->speaks();
//   visit->admit(has_proved);     // the stranger is a peer; throws Rejected
//   visit->is_busy(true);         // it has begun a batch
//
// Layer: transfer. Thread-safe. A visit ends with its object.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <utility>

#include "transfer/base/limit.h"

namespace mk::transfer {

class Admission {
 public:
  struct Limits {
    size_t num_strangers = 256;
    size_t num_peers = 2048;
    std::chrono::nanoseconds idle = std::chrono::minutes(1);  // then a peer's place may be taken
  };

 private:
  using Clock = std::chrono::steady_clock;
  enum class Stage { kSilent, kSpeaking, kPeer, kEnding };

  struct Guest {
    explicit Guest(std::string host) : host(std::move(host)) {}

    const std::string host;
    Stage stage = Stage::kSilent;
    bool has_proved = false;
    Interrupt* interrupt = nullptr;  // null: no one may end it
    std::atomic<bool> is_busy{false};
    std::atomic<Clock::rep> idle_since{Clock::now().time_since_epoch().count()};
  };
  using Guests = std::list<Guest>;

 public:
  class Visit {
   public:
    Visit(Admission& admission, Guests::iterator guest) : admission_(&admission), guest_(guest) {}
    Visit(Visit&& other) noexcept
        : admission_(std::exchange(other.admission_, nullptr)), guest_(other.guest_) {}
    ~Visit() {
      if (admission_) admission_->leave(guest_);
    }

    // From now on its place may be taken: then this is signalled. It must outlive the visit.
    void may_be_ended(Interrupt& interrupt) { admission_->set(guest_, interrupt); }
    void speaks() { admission_->set(guest_, Stage::kSpeaking); }
    void is_turned_away() { admission_->set(guest_, Stage::kSilent); }  // and only lingers
    void admit(bool has_proved) { admission_->admit(guest_, has_proved); }
    void is_busy(bool busy);

   private:
    Admission* admission_;
    Guests::iterator guest_;
  };

  Admission() : Admission(Limits{}) {}
  explicit Admission(const Limits& limits) : limits_(limits), random_(std::random_device{}()) {}

  std::optional<Visit> enter(const std::string& host);  // as a stranger

 private:
  struct Counts {
    size_t num_strangers = 0;
    size_t num_peers = 0;
    size_t num_ending = 0;  // whose places were taken, but that are still here
  };

  static size_t& count_of(Counts& counts, Stage stage);
  void set(Guests::iterator guest, Interrupt& interrupt);
  void set(Guests::iterator guest, Stage stage);
  void admit(Guests::iterator guest, bool has_proved);
  void leave(Guests::iterator guest);

  void move(Guest& guest, Stage stage);
  void end(Guest& guest, const char* reason);
  std::string host_with_most_strangers() const;
  bool end_a_stranger(const std::string& host);
  bool end_an_idle_peer(const std::string* host);  // null: of any host

  const Limits limits_;
  std::mutex mutex_;
  std::minstd_rand random_;
  Guests guests_;  // in the order of their arrival
  Counts total_;
  std::map<std::string, Counts> by_host_;  // those that are here
};

}  // namespace mk::transfer
