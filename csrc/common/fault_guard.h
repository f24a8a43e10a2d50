// guarded: touches memory that may be inaccessible - unmapped, protected, or of a file that was
// truncated - and returns where instead of ending the process by SIGSEGV or SIGBUS.
//
//   if (const auto fault = guarded([&]() noexcept { std::memcpy(dst, src, num_bytes); })) ...
//
// Layer: common. Costs some nanoseconds a call. The first call installs handlers of both signals,
// which remain; any other fault goes on to the handlers that were there before. A handler that is
// installed later decides whether ours is called at all: Python's faulthandler prints its
// traceback, and then calls it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>

namespace mk {

struct Fault {
  int signal;
  uint64_t address;  // 0: not known

  // "at 0x7f00: it is unmapped or protected".
  std::string describe() const;
};

std::optional<Fault> run_guarded(void (*body)(void*), void* argument);

// The body is left where it faults, without destructors: it may own nothing, lock nothing, and
// throw nothing. What it has changed by then is not known.
template <class Body>
std::optional<Fault> guarded(Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  static_assert(std::is_nothrow_invocable_v<Plain&>);
  return run_guarded([](void* argument) { (*static_cast<Plain*>(argument))(); },
                     const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}

// Reads a byte of each page.
std::optional<Fault> try_to_read(const void* data, size_t num_bytes);

// Whether the kernel could read (write) these bytes here. True also where it cannot say, before
// Linux 5.14. It allocates what is missing, and changes no contents.
bool is_accessible(const void* data, size_t num_bytes, bool for_write);

}  // namespace mk
