// start_thread: a std::thread that takes no signals, so that they reach the program's own threads
// (a SIGINT handled by ours would not wake a Python main thread out of its system call).
#pragma once

#include <signal.h>
#include <time.h>

#include <cerrno>
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

// While it lives, what the calling thread writes to a pipe or socket that nobody reads is EPIPE to
// it, and no SIGPIPE. For libraries that write without MSG_NOSIGNAL: a thread of a caller's has the
// mask of its program. Costs one system call where the signal is blocked already.
class NoSigpipe {
 public:
  NoSigpipe() {
    sigemptyset(&only_);
    sigaddset(&only_, SIGPIPE);
    sigset_t pending;
    pthread_sigmask(SIG_BLOCK, &only_, &before_);
    if (sigismember(&before_, SIGPIPE)) return;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE);  // of the whole process: somebody else's
  }
  NoSigpipe(const NoSigpipe&) = delete;
  ~NoSigpipe() {
    if (sigismember(&before_, SIGPIPE)) return;
    const int error_number = errno;
    const timespec at_once{};
    while (!was_pending_ && sigtimedwait(&only_, nullptr, &at_once) < 0 && errno == EINTR) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = error_number;
  }

 private:
  sigset_t only_;
  sigset_t before_;
  bool was_pending_ = false;
};

// Throws std::system_error when the machine gives no more threads.
template <class Body>
std::thread start_thread(Body&& body) {
  const BlockSignals blocked;  // the new thread inherits the mask
  return std::thread(std::forward<Body>(body));
}

}  // namespace mk
