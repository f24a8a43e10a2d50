// What the fuzz targets share: memory with nothing allowed around it, and a peer that says what the
// fuzzer wants.
//
// A target's input is a byte that says how far the peer plays by the rules, and then the bytes that
// he says when he no longer does.
#pragma once

#include <sanitizer/asan_interface.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "transfer/net/handshake.h"
#include "transfer/net/secret.h"
#include "transfer/net/socket.h"
#include "transfer/wire/wire.h"

namespace mk::fuzz {

using namespace mk::transfer;

#define FUZZ_EXPECT(condition)                                             \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                        \
    }                                                                      \
  } while (false)

// Memory at an address that the seeds know. What is outside the allowed ranges is poisoned, so that
// the sanitizer notices whoever reads or writes it, also by recvmsg and sendmsg.
class Arena {
 public:
  static constexpr uint64_t kAddress = 0x2000'0000'0000;  // as in seeds.py
  static constexpr size_t kBytes = 64 << 10;
  static constexpr unsigned char kPattern = 0xA7;

  Arena() {
    void* const wanted = reinterpret_cast<void*>(kAddress);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
    FUZZ_EXPECT(mmap(wanted, kBytes, PROT_READ | PROT_WRITE, flags, -1, 0) == wanted);
    std::memset(wanted, kPattern, kBytes);
    __asan_poison_memory_region(wanted, kBytes);
  }

  static void allow(const Range& range) {
    __asan_unpoison_memory_region(reinterpret_cast<void*>(range.address), range.num_bytes);
  }

  static bool is_untouched(const Range& range) {
    static const std::string pattern(kBytes, static_cast<char>(kPattern));
    return std::memcmp(reinterpret_cast<void*>(range.address), pattern.data(), range.num_bytes) ==
           0;
  }

  static void restore(const Range& range) {
    std::memset(reinterpret_cast<void*>(range.address), kPattern, range.num_bytes);
  }

  // Fills a range with what no peer may get to see, nor can guess. say_all looks for it.
  static void hide(const Range& range);
};

// The peer's end of a socket pair, and the thread that plays the peer.
class Player {
 public:
  Player() : thread_([this] { work(); }) { thread_.detach(); }

  // Returns our end; the part is played at the other one, which closes when it is over.
  Socket start(std::function<void(int)> part);
  void wait();  // until it is over

 private:
  void work();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void(int)> part_;
  int fd_ = -1;
  std::thread thread_;
};

// Says all of it, takes in whatever comes meanwhile, and then waits for the other side to end.
void say_all(int fd, const uint8_t* data, size_t num_bytes);

// What a peer hears who plays by the rules; false if the other side has ended.
bool hear(int fd, void* data, size_t num_bytes);
bool hear_greeting(int fd, Greeting& greeting);

inline const Secret& secret() {
  static const Secret shared("what both of them know");
  return shared;
}

}  // namespace mk::fuzz
