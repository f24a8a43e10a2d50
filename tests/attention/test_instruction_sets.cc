// Paged attention by each instruction set that this processor has, compared with the definition in
// double.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "attention/paged_attention.h"
#include "expect.h"

namespace {

using namespace mk;
using namespace mk::attention;

float random_number(uint32_t& state) {
  state = state * 1664525u + 1013904223u;
  return static_cast<float>(state >> 8) / (1 << 23) - 1;
}

template <class E>
std::vector<typename E::Code> random_codes(size_t count, uint32_t& state) {
  std::vector<typename E::Code> codes(count);
  for (auto& code : codes) code = E::from_float(random_number(state));
  return codes;
}

// Two requests over one cache of blocks in no order: queries that see a window, sinks and a tail.
template <class E, int64_t kDim, int64_t kValueDim>
struct Step {
  static constexpr int64_t kHeads = 6, kKvHeads = 2, kBlock = 5;
  std::vector<int32_t> cu_q{0, 3, 30}, kv_lens{1200, 150}, tail_base{1196, 120};
  int64_t num_q = 30, num_blocks = 300, table_stride = 241;
  uint32_t state = 7;
  std::vector<typename E::Code> q = random_codes<E>(num_q * kHeads * kDim, state);
  std::vector<typename E::Code> k = random_codes<E>(num_blocks * kBlock * kKvHeads * kDim, state);
  std::vector<typename E::Code> v =
      random_codes<E>(num_blocks * kBlock * kKvHeads * kValueDim, state);
  std::vector<int32_t> table, intervals;
  std::vector<int64_t> tail_bits;
  std::vector<float> scales{0.5f, 3.f};

  Step() {
    for (int64_t i = 0; i < 2 * table_stride; ++i) table.push_back(i * 7 % num_blocks);
    for (int32_t i = 0; i < num_q; ++i) {
      const int32_t end = i < 3 ? 1190 + i : 60 + i;
      const std::vector<int32_t> row =
          i == 8 ? std::vector<int32_t>{0, 0, 0, 0} : std::vector<int32_t>{0, 3, end - 55, end};
      intervals.insert(intervals.end(), row.begin(), row.end());
      tail_bits.push_back(i == 8 ? 0 : i % 2 ? 5 : 0);
    }
  }

  bool sees(int64_t request, int64_t row, int64_t key) const {
    const int32_t* i = &intervals[row * 4];
    const int64_t bit = key - tail_base[request];
    return (key >= i[0] && key < i[1]) || (key >= i[2] && key < i[3]) ||
           (bit >= 0 && bit < 64 && (tail_bits[row] >> bit & 1));
  }

  const typename E::Code* at(const std::vector<typename E::Code>& cache, int64_t dim,
                             int64_t request, int64_t key, int64_t head) const {
    const int64_t block = table[request * table_stride + key / kBlock];
    return &cache[((block * kBlock + key % kBlock) * kKvHeads + head) * dim];
  }

  void check_row(int64_t request, int64_t row, int64_t head, const typename E::Code* out, float lse,
                 double tolerance) const {
    const int64_t kv_head = head / (kHeads / kKvHeads);
    double sum = 0;
    std::vector<double> values(kValueDim);
    for (int64_t key = 0; key < kv_lens[request]; ++key) {
      if (!sees(request, row, key)) continue;
      double score = 0;
      for (int64_t d = 0; d < kDim; ++d) {
        score += double{E::to_float(q[(row * kHeads + head) * kDim + d])} *
                 E::to_float(at(k, kDim, request, key, kv_head)[d]);
      }
      const double weight = std::exp(score * 0.25 * scales[kv_head]);
      sum += weight;
      for (int64_t d = 0; d < kValueDim; ++d) {
        values[d] += weight * E::to_float(at(v, kValueDim, request, key, kv_head)[d]);
      }
    }
    EXPECT(sum == 0 ? lse == -INFINITY : std::fabs(lse - std::log(sum)) < 1e-4);
    for (int64_t d = 0; d < kValueDim; ++d) {
      const double expected = sum == 0 ? 0 : values[d] / sum * scales[kv_head];
      EXPECT(std::fabs(E::to_float(out[d]) - expected) < tolerance);
    }
  }

  void check(const AttendFunctions& functions, double tolerance) {
    std::vector<typename E::Code> out(num_q * kHeads * kValueDim);
    std::vector<float> lse(num_q * kHeads);
    std::atomic<int64_t> bad{kNoEntry};
    const auto cache = [&](const std::vector<typename E::Code>& codes, int64_t dim) {
      const int64_t row = dim * size_of(E::kType);
      return PagedCache{reinterpret_cast<const char*>(codes.data()),
                        E::kType,
                        row * kKvHeads * kBlock,
                        row * kKvHeads,
                        row,
                        dim,
                        scales.data()};
    };
    PagedAttentionParams p{};
    p.q = reinterpret_cast<const char*>(q.data());
    p.q_type = E::kType;
    p.q_row_stride = kHeads * kDim * size_of(E::kType);
    p.q_head_stride = kDim * size_of(E::kType);
    p.k = cache(k, kDim);
    p.v = cache(v, kValueDim);
    p.block_table = table.data();
    p.table_stride = table_stride;
    p.num_blocks = num_blocks;
    p.block_size = kBlock;
    p.mask = {intervals.data(), tail_bits.data(), tail_base.data(), cu_q.data(), kv_lens.data()};
    p.num_requests = 2;
    p.num_heads = kHeads;
    p.num_kv_heads = kKvHeads;
    p.scale = 0.25f;
    p.out = reinterpret_cast<char*>(out.data());
    p.lse = lse.data();
    p.bad_entry = &bad;
    PagedAttention attention(p, functions);
    Workspace workspace;
    for (int64_t i = 0; i < attention.num_tasks(); ++i) attention.run(i, workspace);
    for (int64_t i = 0; i < attention.num_merges(); ++i) attention.merge(i, workspace);
    EXPECT(attention.num_merges() == kKvHeads && bad == kNoEntry);
    for (int64_t row = 0; row < num_q; ++row) {
      for (int64_t head = 0; head < kHeads; ++head) {
        const int64_t index = row * kHeads + head;
        check_row(row < 3 ? 0 : 1, row, head, &out[index * kValueDim], lse[index], tolerance);
      }
    }
  }
};

// Keys of which nothing is seen take neither a task nor a state, however many they are.
void check_num_tasks() {
  const std::vector<int32_t> cu_q{0, 1, 2}, kv_lens{1 << 30, 1 << 30}, tail_base{1 << 30, 1 << 30};
  const std::vector<int32_t> intervals{0, 4, 5 << 20, (5 << 20) + 1025, 0, 0, 0, 0};
  const std::vector<int64_t> tail_bits{0, 0};
  PagedAttentionParams p{};
  p.mask = {intervals.data(), tail_bits.data(), tail_base.data(), cu_q.data(), kv_lens.data()};
  p.num_requests = 2;
  p.num_heads = p.num_kv_heads = 2;
  p.k.dim = p.v.dim = 8;
  const PagedAttention attention(p, *AttendFunctions::portable());
  EXPECT(attention.num_tasks() == 2 * 3 && attention.num_merges() == 2 * 2);
}

using Float32 = Element<ElementType::kFloat32>;
using BFloat16 = Element<ElementType::kBFloat16>;

}  // namespace

int main() {
  check_num_tasks();
  Step<Float32, 40, 72> floats;  // padded
  Step<BFloat16, 40, 72> halves;
  Step<Float32, 64, 96> whole_floats;  // read where they lie in the cache
  Step<BFloat16, 64, 96> whole_halves;
  const auto check_halves = [&](const char* name, const AttendFunctions* functions) {
    std::printf("%s\n", name);
    halves.check(*functions, 3e-2);
    whole_halves.check(*functions, 3e-2);
  };
  const auto check = [&](const char* name, const AttendFunctions* functions) {
    check_halves(name, functions);
    floats.check(*functions, 1e-5);
    whole_floats.check(*functions, 1e-5);
  };
  check("portable", AttendFunctions::portable());
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    check("avx2", AttendFunctions::avx2());
  }
  if (__builtin_cpu_supports("avx512bw")) check("avx512", AttendFunctions::avx512());
  if (__builtin_cpu_supports("avx512bf16")) {
    check_halves("avx512_bf16", AttendFunctions::avx512_bf16());
  }
#endif
  return failures();
}
