// XXH3 by the instructions of the file that includes this, in its nameless namespace.
//
// Layer: store. Without a guard, since each of those files has a copy of its own.

uint64_t hash(const void* data, size_t num_bytes) { return XXH3_64bits(data, num_bytes); }

void update(void* state, const void* data, size_t num_bytes) {
  XXH3_64bits_update(static_cast<XXH3_state_t*>(state), data, num_bytes);
}

// Calls `copy(i, stripe)` with each stripe, as it is hashed.
template <class Copy>
inline void add_stripes(uint64_t* accumulators, uint64_t first, uint64_t count, const char* src,
                        const Copy& copy) {
  constexpr uint64_t kBlock = (XXH_SECRET_DEFAULT_SIZE - XXH_STRIPE_LEN) / XXH_SECRET_CONSUME_RATE;
  XXH_ALIGN(XXH_ACC_ALIGN) uint64_t sums[XXH_ACC_NB];  // in registers: no store aliases it
  std::memcpy(sums, accumulators, sizeof(sums));
  uint64_t in_block = first % kBlock;
  for (uint64_t i = 0; i < count; ++i) {
    XXH_ALIGN(XXH_STRIPE_LEN) char stripe[XXH_STRIPE_LEN];
    std::memcpy(stripe, src + i * XXH_STRIPE_LEN, XXH_STRIPE_LEN);
    copy(i, stripe);
    XXH3_accumulate_512(sums, stripe, XXH3_kSecret + in_block * XXH_SECRET_CONSUME_RATE);
    if (++in_block == kBlock) {
      XXH3_scrambleAcc(sums, XXH3_kSecret + XXH_SECRET_DEFAULT_SIZE - XXH_STRIPE_LEN);
      in_block = 0;
    }
  }
  std::memcpy(accumulators, sums, sizeof(sums));
}

void add(uint64_t* accumulators, uint64_t first, uint64_t count, const char* src, char* dst) {
  if (dst) {
    add_stripes(accumulators, first, count, src, [&](uint64_t i, const char* stripe) {
      std::memcpy(dst + i * XXH_STRIPE_LEN, stripe, XXH_STRIPE_LEN);
    });
  } else {
    add_stripes(accumulators, first, count, src, [](uint64_t, const char*) {});
  }
}

#if XXH_VECTOR == XXH_AVX2

void add_streamed(uint64_t* accumulators, uint64_t first, uint64_t count, const char* src,
                  char* dst) {
  constexpr uint64_t kAhead = 2048;  // with these stores the processor reads ahead too little
  if (count == 0) return;
  // From the first address on that such stores accept, 64 bytes that may begin within a stripe.
  const uint64_t head = -reinterpret_cast<uintptr_t>(dst) % sizeof(__m256i);
  std::memcpy(dst, src, head);
  add_stripes(accumulators, first, count, src, [&](uint64_t i, const char*) {
    if (i + 1 == count) return;
    const uint64_t at = i * XXH_STRIPE_LEN + head;
    const auto* const in = reinterpret_cast<const __m256i*>(src + at);
    auto* const out = reinterpret_cast<__m256i*>(dst + at);
    _mm_prefetch(src + at + kAhead, _MM_HINT_T0);
    const __m256i low = _mm256_loadu_si256(in), high = _mm256_loadu_si256(in + 1);
    _mm256_stream_si256(out, low);
    _mm256_stream_si256(out + 1, high);
  });
  const uint64_t done = (count - 1) * XXH_STRIPE_LEN + head;
  std::memcpy(dst + done, src + done, count * XXH_STRIPE_LEN - done);
  _mm_sfence();  // later stores may announce what was stored
}

constexpr Xxh3 kFunctions{hash, update, add, add_streamed};

#else

constexpr Xxh3 kFunctions{hash, update, add, nullptr};

#endif
