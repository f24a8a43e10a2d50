// start_thread: a std::thread with all signals blocked, so that they reach the program's own
// threads (a SIGINT handled by ours would not interrupt a Python main thread's system call). Not
// SIGSEGV and SIGBUS: what raises them in a thread ends the process if the thread blocks them.
//
// Layer: common.
#pragma once

#include <signal.h>
#include <time.h>

#include <cerrno>
#include <system_error>
#include <thread>
#include <utility>

#include "common/check.h"

namespace mk {

class BlockSignals {
 public:
  BlockSignals() {
    sigset_t all;
    sigfillset(&all);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGBUS);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  BlockSignals(const BlockSignals&) = delete;
  ~BlockSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

// While it lives, a write by the calling thread to a pipe or socket without a reader fails with
// EPIPE and raises no SIGPIPE. For libraries that write without MSG_NOSIGNAL: a caller's thread has
// its program's signal mask. Costs one system call if the signal is already blocked.
class NoSigpipe {
 public:
  NoSigpipe() {
    sigemptyset(&only_);
    sigaddset(&only_, SIGPIPE);
    sigset_t pending;
    pthread_sigmask(SIG_BLOCK, &only_, &before_);
    if (sigismember(&before_, SIGPIPE)) return;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE);  // for the whole process: not ours
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

// Throws SystemError if no thread can be started.
template <class Body>
std::thread start_thread(Body&& body) {
  const BlockSignals blocked;  // the new thread inherits the mask
  try {
    return std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    throw SystemError(error.code().value(), "no thread can be started");
  }
}

}  // namespace mk
