// Accesses that fault, in each of the states in which a process's signals may be.
#include "common/fault_guard.h"

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "common/thread.h"

namespace {

constexpr size_t kPage = 4096, kBytes = 64 * kPage;

void expect(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s\n", what);
  _exit(1);
}

// Memory of which only the first page can be accessed.
char* spoiled(bool truncated) {
  const int fd = memfd_create("spoiled", 0);
  expect(fd >= 0 && ftruncate(fd, kBytes) == 0, "memory");
  void* const at = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  expect(at != MAP_FAILED, "mmap");
  std::memset(at, 7, kBytes);
  if (truncated) {
    expect(ftruncate(fd, kPage) == 0, "ftruncate");
  } else {
    expect(mprotect(static_cast<char*>(at) + kPage, kBytes - kPage, PROT_NONE) == 0, "mprotect");
  }
  close(fd);
  return static_cast<char*>(at);
}

void catches(bool truncated) {
  char* const memory = spoiled(truncated);
  const auto bad = reinterpret_cast<uint64_t>(memory) + kPage;
  std::vector<char> good(kBytes, 1);
  const auto read = mk::guarded([&]() noexcept { std::memcpy(good.data(), memory, kBytes); });
  expect(read && read->signal == (truncated ? SIGBUS : SIGSEGV), "a read");
  // A copy may begin at its end.
  expect(read->address >= bad && read->address < bad + kBytes, "the address of a read");
  const auto write = mk::guarded([&]() noexcept { std::memcpy(memory, good.data(), kBytes); });
  expect(write.has_value(), "a write");
  expect(!mk::guarded([&]() noexcept { std::memcpy(good.data(), memory, kPage); }), "a good read");
  const auto tried = mk::try_to_read(memory + 5, kBytes - 5);
  expect(tried && tried->address == bad, "the first page that is bad");
  expect(!mk::try_to_read(memory + 5, kPage - 5), "a good page");
  expect(mk::is_accessible(memory, kPage, true), "the kernel's view of a good page");
  expect(!mk::is_accessible(memory + 5, kBytes - 5, false), "the kernel's view of bad pages");
  munmap(memory, kBytes);
}

void catches_both() {
  catches(true);
  catches(false);
}

void in_many_threads() {
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.push_back(mk::start_thread([] {
      for (int turn = 0; turn < 50; ++turn) catches_both();
    }));
  }
  for (std::thread& thread : threads) thread.join();
}

void nested() {
  char* const memory = spoiled(false);
  bool inner = false, after = false;
  const auto outer = mk::guarded([&]() noexcept {
    inner = mk::guarded([&]() noexcept { memory[kPage] = 1; }).has_value();
    after = true;
    memory[2 * kPage] = 1;
  });
  expect(inner && after && outer, "one within another");
}

// Exits of a child in which `body` runs.
int status_of(void (*body)()) {
  const pid_t pid = fork();
  if (pid == 0) {
    body();
    _exit(0);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  return status;
}

int num_calls = 0;
sigjmp_buf place;

void arm() {
  expect(!mk::guarded([]() noexcept {}), "nothing");
}

void crash() { *spoiled(false) = *(spoiled(false) + kPage); }

void dies_as_without() {
  arm();
  crash();
}

void is_killed() {
  arm();
  raise(SIGSEGV);
}

void ignores() {
  signal(SIGSEGV, SIG_IGN);
  arm();
  raise(SIGSEGV);
  kill(getpid(), SIGSEGV);
}

// Of another library, which was there first.
void passes_on() {
  struct sigaction theirs{};
  theirs.sa_handler = [](int) {
    ++num_calls;
    siglongjmp(place, 1);
  };
  sigaction(SIGSEGV, &theirs, nullptr);
  arm();
  for (int i = 1; i <= 3; ++i) {
    if (sigsetjmp(place, 1) == 0) crash();
    expect(num_calls == i, "their handler");
    catches_both();
  }
  expect(num_calls == 3, "not for ours");
}

void blocked() {
  sigset_t all;
  sigfillset(&all);
  std::thread([&] {
    pthread_sigmask(SIG_SETMASK, &all, nullptr);
    catches_both();
  }).join();
}

// Installed after ours, like faulthandler: it prints, restores what was there, and raises again.
struct sigaction replaced;
void later_handler(int number) {
  ++num_calls;
  sigaction(number, &replaced, nullptr);
  raise(number);
}

void another_comes_later() {
  arm();
  struct sigaction theirs{};
  theirs.sa_handler = later_handler;
  theirs.sa_flags = SA_NODEFER;
  sigaction(SIGSEGV, &theirs, &replaced);
  char* const memory = spoiled(false);
  const auto fault = mk::guarded([&]() noexcept { memory[kPage] = 1; });
  expect(fault && fault->address == 0, "a fault that another has raised again");
  expect(num_calls == 1, "their handler, once");
  catches_both();
}

void on_another_stack() {
  std::vector<char> room(1 << 16);
  stack_t stack{};
  stack.ss_sp = room.data();
  stack.ss_size = room.size();
  sigaltstack(&stack, nullptr);
  for (int i = 0; i < 100; ++i) catches_both();
  stack.ss_flags = SS_DISABLE;
  sigaltstack(&stack, nullptr);
}

}  // namespace

int main() {
  expect(status_of(catches_both) == 0, "both signals");
  expect(status_of(in_many_threads) == 0, "many threads");
  expect(status_of(nested) == 0, "nested");
  expect(status_of(passes_on) == 0, "a handler that was there before");
  expect(status_of(blocked) == 0, "blocked signals");
  expect(status_of(another_comes_later) == 0, "a handler that comes later");
  expect(status_of(on_another_stack) == 0, "an alternate stack");
  expect(status_of(ignores) == 0, "an ignored signal that is sent");
  const int crashed = status_of(dies_as_without), killed = status_of(is_killed);
  expect(WIFSIGNALED(crashed) && WTERMSIG(crashed) == SIGSEGV, "a fault elsewhere");
  expect(WIFSIGNALED(killed) && WTERMSIG(killed) == SIGSEGV, "a signal that is sent");
  arm();
  expect(status_of(catches_both) == 0, "in a forked child");
}
