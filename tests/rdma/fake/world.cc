#include "world.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <thread>

#include "control.h"

namespace fake {
namespace {

using namespace std::chrono_literals;

std::condition_variable met;

// How often each verb was called, by this process and by those it has forked.
struct Counts {
  static constexpr int kNames = 64;
  char names[kNames][32];
  std::atomic<int64_t> calls[kNames];
};
Counts& counts() {
  static auto* const shared =
      new (mmap(nullptr, sizeof(Counts), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))
          Counts{};
  return *shared;
}

std::atomic<int64_t>& calls_of(const char* verb) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  for (int i = 0;; ++i) {
    if (!counts().names[i][0]) std::string(verb).copy(counts().names[i], 31);
    if (std::string(verb) == counts().names[i]) return counts().calls[i];
  }
}

// Until `wanted` calls of the verb are inside at once.
int wait_for_others(Lock* lock, const std::string& verb, int wanted) {
  const int turn = world().num_met[verb]++ / wanted;
  met.notify_all();
  const bool all =
      met.wait_for(*lock, 30s, [&] { return world().num_met[verb] >= (turn + 1) * wanted; });
  return all ? 0 : ETIMEDOUT;
}

size_t copy_lines(const std::vector<std::string>& lines, char* text, size_t size) {
  std::string all;
  for (const std::string& line : lines) all += line + "\n";
  if (size > 0) text[all.copy(text, size - 1)] = 0;
  return all.size();
}

}  // namespace

World& world() {
  static auto* const instance = new World;  // handles may be closed while the process ends
  return *instance;
}

int enter(const char* verb, const Model& model, const std::string& arguments) {
  ++calls_of(verb);
  Lock lock(world().mutex);
  const std::string device = model.device.name;
  if (!arguments.empty()) world().log.push_back(concat(verb, " device=", device, " ", arguments));
  int error = 0, delay_us = 0, meet = 0;
  for (Rule& rule : world().rules) {
    if (rule.verb != verb || (!rule.device.empty() && rule.device != device)) continue;
    if (rule.skip > 0) {
      --rule.skip;
    } else if (rule.count > 0) {
      --rule.count;
      error = rule.error;
      delay_us = rule.delay_us;
      meet = rule.meet;
      break;
    }
  }
  if (meet > 0) error = wait_for_others(&lock, verb, meet);
  lock.unlock();
  if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
  return error;
}

void protest(const std::string& error) { world().errors.push_back(error); }

bool is_live(const void* handle, const char* kind, const char* verb) {
  const auto found = world().live.find(handle);
  const bool live = found != world().live.end() && found->second == kind;
  if (!live) protest(concat(verb, ": not a live ", kind));
  return live;
}

size_t count_live(const std::string& kind) {
  size_t count = 0;
  for (const auto& [handle, its_kind] : world().live) count += its_kind == kind;
  return count;
}

}  // namespace fake

int64_t fake_count_calls(const char* verb) { return fake::calls_of(verb); }
void fake_clear_calls() {
  for (auto& calls : fake::counts().calls) calls = 0;
}

size_t fake_read_log(char* text, size_t size) {
  const fake::Lock lock(fake::world().mutex);
  return fake::copy_lines(fake::world().log, text, size);
}

size_t fake_read_errors(char* text, size_t size) {
  const fake::Lock lock(fake::world().mutex);
  const size_t needed = fake::copy_lines(fake::world().errors, text, size);
  if (needed < size) fake::world().errors.clear();
  return needed;
}
