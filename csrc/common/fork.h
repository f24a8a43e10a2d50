// hold_over_fork: keeps a mutex of the whole process usable in forked children.
//
// A child has the memory of its parent, but only the thread that forked: a mutex that another
// thread held at that moment stays locked for ever. fork() waits for one that is registered here.
//
//   std::mutex& names_mutex();
//   hold_over_fork<names_mutex>();  // once
//
// Layer: common.
#pragma once

#include <pthread.h>

#include <mutex>

#include "common/check.h"

namespace mk {

template <std::mutex& (*kMutex)()>
void hold_over_fork() {
  const auto unlock = [] { kMutex().unlock(); };
  const int error = pthread_atfork([] { kMutex().lock(); }, unlock, unlock);
  if (error) throw SystemError(error, "pthread_atfork");
}

}  // namespace mk
