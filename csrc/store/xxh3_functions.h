// XXH3 by the instructions of the file that includes this, in its nameless namespace.
//
// Layer: store. Without a guard, since each of those files has a copy of its own.

uint64_t hash(const void* data, size_t num_bytes) { return XXH3_64bits(data, num_bytes); }

void update(void* state, const void* data, size_t num_bytes) {
  XXH3_64bits_update(static_cast<XXH3_state_t*>(state), data, num_bytes);
}

constexpr Xxh3 kFunctions{hash, update};
