// start_thread: a std::thread that takes no signals, so that they reach the program's own threads
// (a SIGINT handled by ours would not wake a Python main thread out of its system call).
#pragma once

#include <signal.h>

#include <thread>
#include <utility>

namespace mk {

class BlockSignals {
 public:
  BlockSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  BlockSignals(const BlockSignals&) = delete;
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

// Throws std::system_error when the machine gives no more threads.
template <class Body>
std::thread start_thread(Body&& body) {
  const BlockSignals blocked;  // the new thread inherits the mask
  return std::thread(std::forward<Body>(body));
}

}  // namespace mk
