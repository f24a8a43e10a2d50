// The machine that this libibverbs shows: NICs of any number, and all that lives on them.
//
// Everything is guarded by one mutex. What is destroyed in a wrong order, used after it was
// destroyed, or filled beyond its size is noted as an error, which no test may leave behind.
#pragma once

#include <infiniband/verbs.h>
#undef ibv_query_port
#undef ibv_reg_mr

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

namespace fake {

using Clock = std::chrono::steady_clock;

struct Port {
  ibv_port_attr attr{};
  std::vector<ibv_gid_entry> gids;  // all zero: not set
};

// A NIC.
struct Model {
  ibv_device device{};
  ibv_device_attr attr{};
  uint64_t guid = 0;
  bool is_gone = false;  // listed, but not there when it is opened
  std::vector<Port> ports;
  uint32_t next_key = 0x100;
  uint64_t bytes_per_s = 0;     // 0: as fast as memory
  Clock::time_point free_at{};  // when it has moved all that was posted
};

struct Context {
  verbs_context verbs{};  // of which `context` is what the library's users see
  Model* model = nullptr;
  std::deque<ibv_async_event> events;
};

struct Mr : ibv_mr {
  uint64_t iova = 0;
  char* memory = nullptr;
  unsigned access = 0;
};

struct Send {
  uint64_t wr_id = 0;
  ibv_wr_opcode opcode = IBV_WR_RDMA_WRITE;
  bool is_signaled = false;
  std::vector<ibv_sge> parts;
  uint64_t remote = 0;
  uint32_t rkey = 0;
  uint32_t immediate = 0;
  Clock::time_point done_at{};  // not before
};

struct Qp : ibv_qp {
  ibv_qp_cap cap{};
  int port = 0;
  ibv_qp_attr attr{};  // as modified
  std::deque<Send> sends;
  std::deque<uint64_t> receives;
  unsigned num_used = 0;        // slots of the send queue, given back by polling
  unsigned num_unsignaled = 0;  // of these, whose end the next completion tells
};

struct Entry {
  ibv_wc wc{};
  Qp* qp = nullptr;  // null: destroyed or reset since
  unsigned num_freed = 0;
};

struct Cq : ibv_cq {
  std::deque<Entry> entries;
  bool is_armed = false;
  unsigned num_events = 0, num_acknowledged = 0;
};

struct Channel : ibv_comp_channel {
  std::deque<Cq*> events;
};

// Which calls fail, or wait. Of any device if `device` is empty.
struct Rule {
  std::string verb, device;
  int skip = 0, count = 0;  // it concerns `count` calls after `skip` others
  int error = 0;
  int delay_us = 0;
  int meet = 0;  // waits until that many calls are inside at once
};

// An end that work requests are to come to.
struct WorkRule {
  int skip = 0;
  ibv_wc_status status = IBV_WC_SUCCESS;
};

struct World {
  std::mutex mutex;
  std::condition_variable is_posted;  // to a NIC that has a speed
  std::vector<std::unique_ptr<Model>> models;
  std::map<const void*, std::string> live;  // handles, and what each is
  std::vector<Mr*> mrs;
  std::vector<Qp*> qps;
  std::map<std::string, int64_t> options;
  std::vector<Rule> rules;
  std::map<std::string, int> num_met;  // calls, by verb
  std::vector<WorkRule> work_rules;
  std::vector<std::string> log, errors;
  uint64_t pinned_bytes = 0;
  int64_t budget = -1;  // work requests that may still run; -1: any number
};

World& world();
using Lock = std::unique_lock<std::mutex>;

// Begins a call: counts and logs it, waits if a rule says so. Returns the errno it is to fail with.
int enter(const char* verb, const Model& model, const std::string& arguments = "");

// With the mutex held:
void protest(const std::string& error);
bool is_live(const void* handle, const char* kind, const char* verb);
size_t count_live(const std::string& kind);
void push_event(Context* context, const ibv_async_event& event);
void push_entry(ibv_cq* cq, Entry entry);
void to_error(Qp* qp);
void run_work();          // of all queue pairs, as far as the budget goes
void run_work_in_time();  // from now on, also what is done only after a while
void stop_work(Qp* qp);   // forgets what is posted

Context* context_of(const ibv_context* context);
Model& model_of(const ibv_context* context);
void set_data_path(ibv_context* context);
int poll_cq(ibv_cq* handle, int count, ibv_wc* wcs);
int req_notify_cq(ibv_cq* handle, int solicited_only);
int check_route(const Qp& qp, const ibv_qp_attr& attr);

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class T>
T* refuse(int error) {
  errno = error;
  return nullptr;
}

}  // namespace fake
