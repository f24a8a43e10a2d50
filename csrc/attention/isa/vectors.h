// Vectors of kLanes floats, written once for all instruction sets: a file such as attend_avx512.cc
// sets the target and MK_LANES, then includes this inside its namespace.
//
//   Vector x = load(p);  store(p, exp2(x - splat(largest(x))));
//
// Therefore it has no include guard and includes nothing. Layer: attention.

constexpr int kLanes = MK_LANES;
#if MK_LANES == 16
constexpr int kProductRows = 8;  // rows that a product keeps in registers: see products.h
#elif MK_LANES == 8
constexpr int kProductRows = 6;
#else
constexpr int kProductRows = 4;
#endif

typedef float Vector __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef float Unaligned __attribute__((vector_size(kLanes * 4), aligned(1), may_alias));

#define MK_INLINE __attribute__((always_inline)) static inline

MK_INLINE Vector load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
// Words of a row that is aligned only as its elements are: to 2 bytes, or to 1.
MK_INLINE Vector load(const char* row, int64_t word) {
  return *reinterpret_cast<const Unaligned*>(row + word * 4);
}
MK_INLINE void store(float* to, Vector x) { *reinterpret_cast<Unaligned*>(to) = x; }
template <int... kLane>
MK_INLINE Vector splat(float x, std::integer_sequence<int, kLane...>) {
  return Vector{(static_cast<void>(kLane), x)...};
}
MK_INLINE Vector splat(float x) { return splat(x, std::make_integer_sequence<int, kLanes>()); }
MK_INLINE Vector maximum(Vector a, Vector b) { return a > b ? a : b; }

// The lanes, rotated by kBy.
template <int kBy, int... kLane>
MK_INLINE Vector turned(Vector x, std::integer_sequence<int, kLane...>) {
  return __builtin_shuffle(x, Ints{((kLane + kBy) % kLanes)...});
}

template <int kBy = kLanes / 2>
MK_INLINE float largest(Vector x) {
  x = maximum(x, turned<kBy>(x, std::make_integer_sequence<int, kLanes>()));
  if constexpr (kBy > 1) return largest<kBy / 2>(x);
  return x[0];
}

template <int kBy = kLanes / 2>
MK_INLINE float total(Vector x) {
  x += turned<kBy>(x, std::make_integer_sequence<int, kLanes>());
  if constexpr (kBy > 1) return total<kBy / 2>(x);
  return x[0];
}

// 2^x for x <= 0: to 2^-23, exact at 0, and 0 below 2^-126.
MK_INLINE Vector exp2(Vector x) {
  const Vector magic = splat(0x1.8p23f);             // adding it rounds to an integer
  const Vector clamped = maximum(splat(-126.f), x);  // NaN stays
  const Vector rounded = clamped + magic;
  const Vector f = clamped - (rounded - magic);
  // The polynomial of degree 6 of least relative error on [-1/2, 1/2]: 2e-9.
  Vector p = splat(0x1.41d332p-13f);
  p = p * f + 0x1.5f456ap-10f;
  p = p * f + 0x1.3b2dbcp-7f;
  p = p * f + 0x1.c6aed4p-5f;
  p = p * f + 0x1.ebfbdap-3f;
  p = p * f + 0x1.62e430p-1f;
  p = p * f + 1.f;
  const Ints scaled = (Ints)p + ((Ints)rounded << 23);
  return (Vector)(scaled & ~(x < -126.f));
}

MK_INLINE float exp2(float x) { return exp2(splat(x))[0]; }

// For lane j of x: bit j ? x : otherwise.
template <int... kLane>
MK_INLINE Vector select(uint64_t bits, Vector x, float otherwise,
                        std::integer_sequence<int, kLane...>) {
  const Ints lane_bits = {(1 << kLane)...};
  const Ints chosen = (Ints{} + static_cast<int32_t>(bits)) & lane_bits;
  return chosen != 0 ? x : splat(otherwise);
}
MK_INLINE Vector select(uint64_t bits, Vector x, float otherwise) {
  return select(bits, x, otherwise, std::make_integer_sequence<int, kLanes>());
}

// One step of transposing kLanes rows: for each two rows kStep apart, exchanges the squares off the
// diagonal.
template <int kStep, int... kLane>
MK_INLINE void exchange(Vector* rows, std::integer_sequence<int, kLane...>) {
  const Ints upper = {(kLane & kStep ? kLane - kStep + kLanes : kLane)...};
  const Ints lower = {(kLane & kStep ? kLane + kLanes : kLane + kStep)...};
  for (int i = 0; i < kLanes; ++i) {
    if (i & kStep) continue;
    const Vector a = rows[i], b = rows[i + kStep];
    rows[i] = __builtin_shuffle(a, b, upper);
    rows[i + kStep] = __builtin_shuffle(a, b, lower);
  }
}

template <int kStep = 1>
MK_INLINE void exchange_all(Vector* rows) {
  exchange<kStep>(rows, std::make_integer_sequence<int, kLanes>());
  if constexpr (2 * kStep < kLanes) exchange_all<2 * kStep>(rows);
}

// to[j * to_stride + i] = word first + j of from[i], for i and j below kLanes.
MK_INLINE void transpose(const char* const* from, int64_t first, float* to, int64_t to_stride) {
  Vector rows[kLanes];
  for (int i = 0; i < kLanes; ++i) rows[i] = load(from[i], first);
  exchange_all(rows);
  for (int i = 0; i < kLanes; ++i) store(to + i * to_stride, rows[i]);
}
