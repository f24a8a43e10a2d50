#include "store/xxh3.h"

#include <cstring>

#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

namespace mk::store {
namespace {
#include "store/xxh3_functions.h"

const Xxh3* best() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return Xxh3::avx2();
#endif
  return &Xxh3::plain();
}

}  // namespace

const Xxh3& Xxh3::plain() { return kFunctions; }

const Xxh3& Xxh3::get() {
  static const Xxh3* const functions = best();
  return *functions;
}

}  // namespace mk::store
