// Runs without Python's lock.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

namespace mk::host {

// Lets other Python threads run while it lives. CPython (before 3.14) unwinds a daemon thread that
// reacquires the GIL during interpreter shutdown, and C++ would abort at the first destructor; such
// a thread sleeps until the process exits instead.
class GilReleased {
 public:
  GilReleased() : thread_(PyEval_SaveThread()) {}
  GilReleased(const GilReleased&) = delete;
  ~GilReleased() {
    try {
      PyEval_RestoreThread(thread_);
    } catch (...) {
      while (true) pause();
    }
  }

 private:
  PyThreadState* thread_;
};
using ReleaseGil = pybind11::call_guard<GilReleased>;

}  // namespace mk::host
