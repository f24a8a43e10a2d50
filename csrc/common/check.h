// Errors: four types, named by who can act on them, and two macros that throw them.
//
//   MK_CHECK(block_size > 0, "block_hashes: block_size must be positive, got ", block_size);
//   MK_SYSCALL(listen(fd, 128), "listen");
//
// Layer: common. Python face: mooncake_kernels/errors.py (host/errors.cc translates).
#pragma once

#include <cerrno>
#include <sstream>
#include <stdexcept>
#include <string>
#include <system_error>

namespace mk {

// The caller passed an invalid argument. Python: InvalidArgument, a ValueError.
struct InvalidArgument : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

// The hardware, driver or library is missing on this machine. The message says why.
struct Unavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A CUDA call failed. The message starts with "CUDA: ", by which _library.py recognizes it: torch
// passes on what an operator throws as a plain RuntimeError.
struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A system call failed. Python: OSError with the same errno.
struct SystemError : std::system_error {
  SystemError(int error_number, const std::string& what)
      : std::system_error(error_number, std::generic_category(), what) {}
};

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace mk

// The message is built only when the check fails.
#define MK_CHECK(condition, ...)                                              \
  do {                                                                        \
    if (!(condition)) throw ::mk::InvalidArgument(::mk::concat(__VA_ARGS__)); \
  } while (false)

// Evaluates to the call's result; throws SystemError with errno if it is negative.
#define MK_SYSCALL(call, what)                                 \
  ([&] {                                                       \
    const auto mk_result = (call);                             \
    if (mk_result < 0) throw ::mk::SystemError(errno, (what)); \
    return mk_result;                                          \
  }())
