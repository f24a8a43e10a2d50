// Errors of verbs.
//
// Layer: rdma.
#pragma once

#include <cstdint>
#include <string>

#include "common/check.h"
#include "rdma/verbs.h"

namespace mk::rdma {

// OSError in Python: "ibv_create_qp: mlx5_0: Cannot allocate memory". Most verbs return the errno;
// those that return a pointer leave it in errno.
inline void check_verb(int error, const char* verb, const std::string& what) {
  if (error != 0) throw SystemError(error < 0 ? errno : error, concat(verb, ": ", what));
}

template <class Handle>
Handle* check_handle(Handle* handle, const char* verb, const std::string& what) {
  if (!handle) throw SystemError(errno, concat(verb, ": ", what));
  return handle;
}

}  // namespace mk::rdma
