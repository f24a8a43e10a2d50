// Runs without Python's lock.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

namespace mk::host {

// Calls a function of C that may let other Python threads run. CPython (before 3.14) unwinds a
// daemon thread that then wants the GIL back during interpreter shutdown, which C++ aborts at the
// first destructor, or where an exception is being handled; such a thread sleeps until the process
// exits instead.
//
// It sleeps in a destructor, for `catch (...)` aborts too while an exception is being handled; and
// never inline, since in another destructor nothing may be unwound, not even up to here.
template <class Call>
[[gnu::noinline]] void sleeping_at_exit(const Call& call) {
  struct Sleep {
    bool returned = false;
    ~Sleep() {
      while (!returned) pause();
    }
  } sleep;
  call();
  sleep.returned = true;
}

// Lets other Python threads run while it lives.
class GilReleased {
 public:
  GilReleased() : thread_(PyEval_SaveThread()) {}
  GilReleased(const GilReleased&) = delete;
  ~GilReleased() {
    sleeping_at_exit([this] { PyEval_RestoreThread(thread_); });
  }

 private:
  PyThreadState* thread_;
};
using ReleaseGil = pybind11::call_guard<GilReleased>;

}  // namespace mk::host
