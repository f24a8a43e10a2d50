// Runs without Python's lock.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

namespace mk::host {

// Lets other Python threads run for as long as it lives. A daemon thread that takes the GIL back
// while the interpreter ends is unwound by CPython (before 3.14), and C++ would abort at the first
// destructor: such a thread sleeps until the process is gone.
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
