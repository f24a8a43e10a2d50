// Admission: limits how many connections a server has at a time. Strangers, which have not yet
// authenticated, are counted separately, so that they cannot take the places of peers; and no host
// has more than half of either.
//
//   std::optional<Admission::Visit> visit = admission.enter(host_of(address));   // or nothing
//   visit->admit();     // the stranger is a peer; throws Rejected
//
// Layer: transfer. Thread-safe. A visit ends with its object.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

namespace mk::transfer {

class Admission {
 public:
  class Visit {
   public:
    Visit(Admission& admission, std::string host)
        : admission_(&admission), host_(std::move(host)) {}
    Visit(Visit&& other) noexcept
        : admission_(std::exchange(other.admission_, nullptr)),
          host_(std::move(other.host_)),
          is_peer_(other.is_peer_) {}
    ~Visit() {
      if (admission_) admission_->leave(host_, is_peer_);
    }

    void admit();

   private:
    Admission* admission_;
    std::string host_;
    bool is_peer_ = false;
  };

  std::optional<Visit> enter(const std::string& host);  // as a stranger

 private:
  struct Counts {
    size_t num_strangers = 0;
    size_t num_peers = 0;
  };

  void admit(const std::string& host);
  void leave(const std::string& host, bool is_peer);

  std::mutex mutex_;
  Counts total_;
  std::map<std::string, Counts> by_host_;  // those that are here
};

}  // namespace mk::transfer
