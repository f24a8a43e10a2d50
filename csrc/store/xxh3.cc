#include "store/xxh3.h"

#define XXH_INLINE_ALL
#include "xxhash/xxhash.h"

namespace mk::store {
namespace {

uint64_t hash(const void* data, size_t num_bytes) { return XXH3_64bits(data, num_bytes); }

void update(void* state, const void* data, size_t num_bytes) {
  XXH3_64bits_update(static_cast<XXH3_state_t*>(state), data, num_bytes);
}

constexpr Xxh3 kFunctions{hash, update};

const Xxh3* best() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return Xxh3::avx2();
#endif
  return &kFunctions;
}

}  // namespace

const Xxh3& Xxh3::get() {
  static const Xxh3* const functions = best();
  return *functions;
}

}  // namespace mk::store
