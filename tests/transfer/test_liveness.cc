// Liveness and process_id: what another process sees of a thread, however that ends.
#include "transfer/shm/liveness.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <new>
#include <thread>

#include "common/process_id.h"
#include "expect.h"

using namespace mk;
using namespace mk::transfer;

namespace {

using Word = std::atomic<uint32_t>;

Word& shared_word() {
  void* const page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return *new (page) Word(0);
}

void it_is_lowered_with_its_object() {
  Word& word = shared_word();
  {
    const Liveness sign(word);
    EXPECT(Liveness::is_alive(word));
  }
  EXPECT(!Liveness::is_alive(word));
}

// As of a process that is killed while a thread of it serves.
void it_is_lowered_when_the_process_is_killed() {
  Word& word = shared_word();
  const pid_t child = fork();
  if (child == 0) {
    std::thread serving([&] {
      const Liveness sign(word);
      while (true) pause();
    });
    serving.join();
  }
  while (!Liveness::is_alive(word)) usleep(100);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  EXPECT(!Liveness::is_alive(word));
}

void it_is_lowered_when_the_thread_ends_without_a_word() {
  Word& word = shared_word();
  const pid_t child = fork();
  if (child == 0) {
    new Liveness(word);
    _exit(Liveness::is_alive(word) ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT(!Liveness::is_alive(word));
}

void a_child_has_its_own_number() {
  EXPECT(process_id() == getpid());
  const pid_t child = fork();
  if (child == 0) _exit(process_id() == getpid() && process_id() == getpid() ? 0 : 1);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  EXPECT(process_id() == getpid());
}

}  // namespace

int main() {
  it_is_lowered_with_its_object();
  it_is_lowered_when_the_process_is_killed();
  it_is_lowered_when_the_thread_ends_without_a_word();
  a_child_has_its_own_number();
  return failures() != 0;
}
