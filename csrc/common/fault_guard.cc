#include "common/fault_guard.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cerrno>

#include "common/check.h"

namespace mk {
namespace {

constexpr uint64_t kPageBytes = 4096;

// Where a thread goes on after a fault.
struct JumpTarget {
  sigjmp_buf place;
  Fault fault;
  JumpTarget* outer;
};

// In static TLS: a handler must not be the first to touch it, which could allocate it.
thread_local __attribute__((tls_model("initial-exec"))) JumpTarget* volatile jump_target = nullptr;
thread_local __attribute__((tls_model("initial-exec"))) bool is_unblocked = false;

// The handlers before ours; constant once ours are installed.
struct sigaction before_segv, before_bus;
struct sigaction& before(int signal) { return signal == SIGBUS ? before_bus : before_segv; }

// Whether an access of this thread raised it. A handler installed after ours may pass it on by
// raise(), as faulthandler does.
bool is_of_access(const siginfo_t& info) {
  if (info.si_code == SI_TKILL) return info.si_pid == getpid();
#ifdef BUS_MCEERR_AO
  if (info.si_signo == SIGBUS && info.si_code == BUS_MCEERR_AO) return false;  // of any page
#endif
  return info.si_code > 0;
}

// What would have happened without our handler.
void pass_on(int signal, siginfo_t* info, void* context) {
  struct sigaction& previous = before(signal);
  const bool has_handler = previous.sa_flags & SA_SIGINFO
                               ? previous.sa_sigaction != nullptr
                               : previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN;
  if (!has_handler) {
    if (previous.sa_handler == SIG_IGN && info->si_code <= 0) return;
    struct sigaction standard{};
    standard.sa_handler = SIG_DFL;
    sigaction(signal, &standard, nullptr);
    if (!is_of_access(*info) || info->si_code == SI_TKILL) raise(signal);
    return;  // the access is repeated
  }
  const struct sigaction called = previous;
  if (called.sa_flags & static_cast<int>(SA_RESETHAND)) {
    previous = {};
    previous.sa_handler = SIG_DFL;
  }
  sigset_t blocked = called.sa_mask, mask;
  if (!(called.sa_flags & SA_NODEFER)) sigaddset(&blocked, signal);
  pthread_sigmask(SIG_BLOCK, &blocked, &mask);
  if (called.sa_flags & SA_SIGINFO) {
    called.sa_sigaction(signal, info, context);
  } else {
    called.sa_handler(signal);
  }
  pthread_sigmask(SIG_SETMASK, &mask, nullptr);
}

void handle(int signal, siginfo_t* info, void* context) {
  JumpTarget* const here = jump_target;
  if (!here || !is_of_access(*info)) return pass_on(signal, info, context);
  const bool is_located = info->si_code > 0;
  here->fault = {signal, is_located ? reinterpret_cast<uint64_t>(info->si_addr) : 0};
  // As a return would. SA_NODEFER and no mask do so by themselves, but ThreadSanitizer has its own.
  pthread_sigmask(SIG_SETMASK, &static_cast<ucontext_t*>(context)->uc_sigmask, nullptr);
  siglongjmp(here->place, 1);
}

void install(int signal) {
  struct sigaction ours{};
  ours.sa_sigaction = handle;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  sigaction(signal, nullptr, &before(signal));  // known before ours may need it
  sigaction(signal, &ours, nullptr);
}

// A blocked signal that an access raises ends the process, whatever its handler.
void unblock() {
  sigset_t both;
  sigemptyset(&both);
  sigaddset(&both, SIGSEGV);
  sigaddset(&both, SIGBUS);
  pthread_sigmask(SIG_UNBLOCK, &both, nullptr);
  is_unblocked = true;
}

}  // namespace

std::string Fault::describe() const {
  const char* const why = signal == SIGBUS ? "its file was truncated, or a page of it is lost"
                                           : "it is unmapped or protected";
  return address == 0 ? why : concat("at 0x", std::hex, address, ": ", why);
}

__attribute__((noinline)) std::optional<Fault> run_guarded(void (*body)(void*), void* argument) {
  [[maybe_unused]] static const bool is_installed = [] {
    install(SIGSEGV);
    install(SIGBUS);
    return true;
  }();
  if (!is_unblocked) unblock();
  JumpTarget here;
  here.outer = jump_target;
  if (sigsetjmp(here.place, 0) != 0) {
    jump_target = here.outer;
    return here.fault;
  }
  jump_target = &here;
  body(argument);
  jump_target = here.outer;
  return std::nullopt;
}

std::optional<Fault> try_to_read(const void* data, size_t num_bytes) {
  return guarded([&]() noexcept {
    const auto begin = reinterpret_cast<uint64_t>(data);
    for (uint64_t at = begin; at < begin + num_bytes; at = (at / kPageBytes + 1) * kPageBytes) {
      static_cast<void>(*reinterpret_cast<const volatile char*>(at));
    }
  });
}

bool is_accessible(const void* data, size_t num_bytes, bool for_write) {
  constexpr int kPopulateRead = 22, kPopulateWrite = 23;  // the headers may be older
  alignas(kPageBytes) static char known_good[kPageBytes];
  // An old kernel knows none of the two; a new one says the same of memory that is protected.
  static const bool can_tell = madvise(known_good, kPageBytes, kPopulateRead) == 0;
  if (!can_tell) return true;
  const auto at = reinterpret_cast<uint64_t>(data);
  const uint64_t begin = at / kPageBytes * kPageBytes;
  void* const page = reinterpret_cast<void*>(begin);
  const int advice = for_write ? kPopulateWrite : kPopulateRead;
  return madvise(page, at + num_bytes - begin, advice) == 0 || errno == EAGAIN;
}

}  // namespace mk
