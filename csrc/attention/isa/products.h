// The matrix products of attention, c = c * factor + a b, for a tile: see vectors.h for how to
// include this, and attend.h for what a and b are.
//
// b is packed into panels of kPanel columns, [panel][word][kPanel]; a is [rows][words]. A word is a
// float, or two bfloat16 numbers (of neighbouring dims in q k, of neighbouring keys in p v) whose
// products are both added. Sums are accumulated word by word regardless of the number of rows, so
// the bits of a row do not depend on its neighbours. Layer: attention.

constexpr int kPanel = 2 * kLanes;

#if MK_PAIRS
constexpr bool kPairs = true;
MK_INLINE Vector multiply_add(Vector a, Vector b, Vector c) {
  return (Vector)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
}
// Converts words of (dim 2e, dim 2e + 1) of two keys to words of (key, next key), of 2 kLanes dims.
template <int... kLane>
MK_INLINE void interleave(Vector first, Vector second, float* to,
                          std::integer_sequence<int, kLane...>) {
  const Ints a = (Ints)first, b = (Ints)second;
  const Ints even = (a & 0xffff) | (b << 16), odd = ((a >> 16) & 0xffff) | (b & ~0xffff);
  const Ints low = {(kLane / 2 + kLane % 2 * kLanes)...};
  store(to, (Vector)__builtin_shuffle(even, odd, low));
  store(to + kLanes, (Vector)__builtin_shuffle(even, odd, low + kLanes / 2));
}
#else
constexpr bool kPairs = false;
template <class Sequence>
MK_INLINE void interleave(Vector, Vector, float*, Sequence) {}
MK_INLINE Vector multiply_add(Vector a, Vector b, Vector c) { return a * b + c; }
#endif
constexpr int64_t kPerWord = kPairs ? 2 : 1;

struct Words {
  const float* a;
  int64_t a_stride;
  const float* panel;
  KeyRange range;  // range in words
};

// kRows rows of c, over one panel; without factors c is overwritten.
template <int kRows>
MK_INLINE void product(const Words& words, float* c, int64_t c_stride, const float* factors) {
  Vector sums[kRows][2];
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < 2; ++j) {
      sums[r][j] = Vector{};
      if (factors) sums[r][j] = load(c + r * c_stride + j * kLanes) * splat(factors[r]);
    }
  }
  for (int64_t word = words.range.begin; word < words.range.end; ++word) {
    const float* const columns = words.panel + word * kPanel;
    const Vector b0 = load(columns), b1 = load(columns + kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Vector a = splat(words.a[r * words.a_stride + word]);
      sums[r][0] = multiply_add(a, b0, sums[r][0]);
      sums[r][1] = multiply_add(a, b1, sums[r][1]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int j = 0; j < 2; ++j) store(c + r * c_stride + j * kLanes, sums[r][j]);
  }
}

template <int kRows = kProductRows>
static void product_of(int64_t num_rows, const Words& words, float* c, int64_t c_stride,
                       const float* factors) {
  if (num_rows == kRows) return product<kRows>(words, c, c_stride, factors);
  if constexpr (kRows > 1) product_of<kRows - 1>(num_rows, words, c, c_stride, factors);
}
