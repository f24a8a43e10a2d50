#include "common/element_rows.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "common/checksum.h"

namespace mk {
namespace {

#define MK_INLINE __attribute__((always_inline)) inline

// memcpy, as a row may begin anywhere.
template <ElementType kType>
MK_INLINE void load(const char* row, int64_t count, float* values) {
  using Code = typename Element<kType>::Code;
  for (int64_t i = 0; i < count; ++i) {
    Code code;
    std::memcpy(&code, row + i * int64_t{sizeof code}, sizeof code);
    values[i] = Element<kType>::to_float(code);
  }
}

template <ElementType kType>
MK_INLINE void store(const float* values, int64_t count, char* row) {
  using Code = typename Element<kType>::Code;
  for (int64_t i = 0; i < count; ++i) {
    const Code code = Element<kType>::from_float(values[i]);
    std::memcpy(row + i * int64_t{sizeof code}, &code, sizeof code);
  }
}

template <bool kInterleaved>
MK_INLINE void rotate(const float* cos_sin, int64_t num_pairs, float* values) {
  for (int64_t j = 0; j < num_pairs; ++j) {
    float& x = values[kInterleaved ? 2 * j : j];
    float& y = values[kInterleaved ? 2 * j + 1 : j + num_pairs];
    const float c = cos_sin[j], s = cos_sin[num_pairs + j], old_x = x;
    x = x * c - y * s;
    y = y * c + old_x * s;
  }
}

constexpr int64_t kLineBytes = 64;

// As many words as a vector of the target has: GCC keeps the halves of a wider one in memory from
// one line to the next, and sums take four times as long.
template <int kBytes>
struct Vector {
  typedef uint64_t Words __attribute__((vector_size(kBytes)));
};

// checksum_bytes() of each row, added up. A macro, as `store` must be inlined into a function of
// its own target.
#define MK_SUM_ROWS(vector_bytes, store)                                           \
  using Words = Vector<vector_bytes>::Words;                                       \
  constexpr int kWords = vector_bytes / kWordBytes;                                \
  constexpr int kVectors = kLineBytes / vector_bytes;                              \
  Words steps = {};                                                                \
  for (int k = 0; k < kWords; ++k) steps[k] = k * kKeyStep;                        \
  Words sums[kVectors] = {};                                                       \
  uint64_t rest = 0, index = rows.index;                                           \
  for (int64_t r = 0; r < rows.count; ++r, index += rows.index_step) {             \
    const char* const row = rows.first + r * rows.stride;                          \
    const char* const next = rows.next + r * rows.stride;                          \
    [[maybe_unused]] char* const copy = rows.copy + r * rows.copy_stride;          \
    Words keys = steps + checksum_key(index);                                      \
    int64_t i = 0;                                                                 \
    for (; i + kLineBytes <= rows.row_bytes; i += kLineBytes) {                    \
      __builtin_prefetch(next + i);                                                \
      for (int v = 0; v < kVectors; ++v, keys += kWords * kKeyStep) {              \
        Words words;                                                               \
        std::memcpy(&words, row + i + v * vector_bytes, sizeof words);             \
        add_checksum_term(sums[v], words, keys);                                   \
      }                                                                            \
      store(copy + i, row + i);                                                    \
    }                                                                              \
    if (i < rows.row_bytes) {                                                      \
      rest += checksum_bytes(row + i, rows.row_bytes - i, index + i / kWordBytes); \
    }                                                                              \
  }                                                                                \
  for (const Words& sum : sums) {                                                  \
    for (int k = 0; k < kWords; ++k) rest += sum[k];                               \
  }                                                                                \
  return rest;

#define MK_STORE_NOTHING(to, from)
#define MK_COPY_LINE(to, from) std::memcpy(to, from, kLineBytes)
#define MK_STREAM_AVX512(to, from) \
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from))
#define MK_STREAM_AVX2(to, from)                                                              \
  for (int64_t half = 0; half < kLineBytes; half += 32) {                                     \
    _mm256_stream_si256(reinterpret_cast<__m256i*>((to) + half),                              \
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>((from) + half))); \
  }

#define MK_EACH_TYPE(call)                   \
  switch (type) {                            \
    case ElementType::kFloat32:              \
      return call(ElementType::kFloat32);    \
    case ElementType::kFloat16:              \
      return call(ElementType::kFloat16);    \
    case ElementType::kBFloat16:             \
      return call(ElementType::kBFloat16);   \
    case ElementType::kFloat8E4M3:           \
      return call(ElementType::kFloat8E4M3); \
    case ElementType::kFloat8E5M2:           \
      return call(ElementType::kFloat8E5M2); \
    case ElementType::kBytes:                \
      return;                                \
  }
#define MK_LOAD(type) load<type>(row, count, values)
#define MK_STORE(type) store<type>(values, count, row)

// One source for all instruction sets: code inlined into a function is compiled for its target.
#define MK_ROW_FUNCTIONS(name, target, vector_bytes, stream)                                       \
  target void load_##name(ElementType type, const char* row, int64_t count, float* values){        \
      MK_EACH_TYPE(MK_LOAD)} target void store_##name(ElementType type, const float* values,       \
                                                      int64_t count, char* row){MK_EACH_TYPE(      \
      MK_STORE)} target void multiply_##name(float* values, int64_t count, float factor) {         \
    for (int64_t i = 0; i < count; ++i) values[i] *= factor;                                       \
  }                                                                                                \
  target void divide_##name(float* values, int64_t count, float divisor) {                         \
    for (int64_t i = 0; i < count; ++i) values[i] /= divisor;                                      \
  }                                                                                                \
  target void rotate_##name(const Rotation& rotation, const float* cos_sin, float* values) {       \
    const int64_t num_pairs = rotation.num_pairs;                                                  \
    if (rotation.interleaved) return rotate<true>(cos_sin, num_pairs, values + rotation.first);    \
    rotate<false>(cos_sin, num_pairs, values + rotation.first);                                    \
  }                                                                                                \
  target uint64_t sum_##name(const SummedRows& rows){                                              \
      MK_SUM_ROWS(vector_bytes,                                                                    \
                  MK_STORE_NOTHING)} target uint64_t copy_and_sum_##name(const SummedRows& rows) { \
    MK_SUM_ROWS(vector_bytes, stream)                                                              \
  }                                                                                                \
  constexpr RowFunctions k_##name{load_##name,   store_##name, multiply_##name,    divide_##name,  \
                                  rotate_##name, sum_##name,   copy_and_sum_##name};

MK_ROW_FUNCTIONS(plain, , 16, MK_COPY_LINE)
#if defined(__x86_64__)
MK_ROW_FUNCTIONS(avx2, __attribute__((target("avx2"))), 32, MK_STREAM_AVX2)
MK_ROW_FUNCTIONS(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), 64,
                 MK_STREAM_AVX512)
#endif

}  // namespace

const RowFunctions& RowFunctions::best() {
#if defined(__x86_64__)
  static const bool has_avx512 = __builtin_cpu_supports("avx512bw") &&
                                 __builtin_cpu_supports("avx512dq") &&
                                 __builtin_cpu_supports("avx512vl");
  if (has_avx512) return k_avx512;
  if (__builtin_cpu_supports("avx2")) return k_avx2;
#endif
  return k_plain;
}

}  // namespace mk
