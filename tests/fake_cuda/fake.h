// A libcuda.so.1 for tests of asynchronous copies, of two GPUs whose memory is made up. Host code
// that touches that memory crashes: at its address nothing is mapped that may be read or written,
// and only the driver's calls know where its bytes are. Nothing is copied before somebody asks, by
// cuEventQuery, whether it is: who does not ask, and wait, finds other bytes than he would like.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace fake {

constexpr int kNumDevices = 2;
constexpr CUdevice kFirstHandle = 10;  // no ordinal is a handle, so who confuses them fails

struct Allocation {
  uint64_t begin, end;
  unsigned type;  // CU_MEMORYTYPE_HOST: pinned
  int device;
  char* bytes;  // where they are
  int fd;       // of the file that they are in; -1 for what another process cannot open
  bool is_imported;
};

struct Event;
struct Op {
  enum class Kind { kCopy, kRecord, kWait, kGate, kHost } kind;
  uint64_t dst, src, num_bytes;
  std::shared_ptr<Event> event;
  uint64_t number;  // of the record, or of the host function
};

struct Stream {
  std::deque<Op> ops;  // not done
  void run();          // as far as it goes
};

struct Event {
  std::shared_ptr<Stream> stream;
  uint64_t num_recorded = 0, num_done = 0;
  int64_t num_looks = 0;  // how often it is said to be not ready yet
};

struct World {
  std::mutex mutex;
  std::list<Allocation> allocations;
  std::map<void*, std::shared_ptr<Stream>> streams;
  std::map<void*, std::shared_ptr<Event>> events;
  std::shared_ptr<Stream> legacy = std::make_shared<Stream>();
  std::map<std::string, int64_t> values;  // what a test sets, and what it counts
  struct Fault {
    int64_t after;
    CUresult error;
  };
  std::map<std::string, Fault> faults;

  Allocation* find(uint64_t address);
  char* bytes_at(uint64_t address, uint64_t num_bytes);  // null: not all of it is of one allocation
  std::shared_ptr<Stream> stream(CUstream handle);
  CUresult fault(const char* function);  // the error that a test wants of this call
};
World& world();

// Whether cuInit was called, in this process: a forked child can neither use CUDA nor call it.
bool is_initialized();
void initialize();  // as a program does that uses GPUs

// Whether the calling thread is in a host function, in which no call is permitted.
bool in_host_function();

// Whether another thread captures a graph, and the calling one is not apart from that.
bool breaks_capture();

// Of the calling thread; null if it has none.
CUcontext current_context();
int current_device();  // there is one

// With the mutex held: memory of a GPU, with nothing that may be touched at its address.
uint64_t allocate(int device, uint64_t num_bytes, bool is_exportable);  // 0: there is no more
void release(uint64_t address);

}  // namespace fake

// The first line of a call that needs no context.
#define FAKE_CALL_BEFORE_CONTEXT()                                            \
  const std::lock_guard lock(fake::world().mutex);                            \
  if (fake::in_host_function()) {                                             \
    return ++fake::world().values["num_forbidden"], CUDA_ERROR_NOT_PERMITTED; \
  }                                                                           \
  if (!fake::is_initialized()) return CUDA_ERROR_NOT_INITIALIZED

// The first lines of a call: one at a time, the error that a test wants, a context.
#define FAKE_CALL(function)                                               \
  FAKE_CALL_BEFORE_CONTEXT();                                             \
  if (const CUresult error = fake::world().fault(function)) return error; \
  if (!fake::current_context()) return CUDA_ERROR_INVALID_CONTEXT

// The same of a call that the driver takes for unsafe while a thread captures a graph.
#define FAKE_UNSAFE_CALL(function)                                                         \
  FAKE_CALL(function);                                                                     \
  if (fake::breaks_capture()) {                                                            \
    return ++fake::world().values["num_forbidden"], CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED; \
  }
