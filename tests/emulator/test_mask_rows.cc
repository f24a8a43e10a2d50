// mask_rows_kernel on the CPU, beside the host loop: mixed rules, ragged requests, and rows past
// the batch's last, as in a CUDA graph that is replayed with shorter lengths.
#include <vector>

#include "emulator/cuda_on_cpu.h"
#include "expect.h"
#include "mask/mask_rows_kernel.cuh"

namespace {

using namespace mk::mask;

// A program by hand, as mooncake_kernels/mask/program.py writes them.
struct Words {
  std::vector<int32_t> words;

  explicit Words(int64_t num_requests) : words(2 * num_requests) {}
  int32_t put(std::vector<int32_t> values) {
    words.insert(words.end(), values.begin(), values.end());
    return static_cast<int32_t>(words.size() - values.size());
  }
  int32_t table(std::vector<int32_t> values) {
    values.insert(values.begin(), static_cast<int32_t>(values.size()));
    return put(values);
  }
  void set(int64_t request, int32_t code, int32_t tail) {
    words[2 * request] = code;
    words[2 * request + 1] = tail;
  }
};

constexpr int32_t op(RuleOp value) { return static_cast<int32_t>(value); }

struct Outputs {
  std::vector<int32_t> intervals;
  std::vector<int64_t> tail_bits;
  std::vector<int32_t> tail_base;

  Outputs(int64_t rows, int64_t requests)
      : intervals(4 * rows, 77), tail_bits(rows, 77), tail_base(requests, 77) {}
  MaskRowsParams put_into(MaskRowsParams p) {
    p.intervals = intervals.data();
    p.tail_bits = tail_bits.data();
    p.tail_base = tail_base.data();
    return p;
  }
};

// The rules of five requests.
Words program() {
  Words w(5);
  const int32_t windows = w.put({3, 40, 100, 7, 1}), sinks = w.put({4}), prefix = w.put({5});
  const int32_t cuts = w.put({w.table({0, 9, 20, 21})});
  const int32_t items = w.put({w.table({5, 11, 30})});
  const int32_t spans = w.put({w.table({2, 6, 40, 90})});
  // Draft 0 is the root, 1 and 2 its children, 3 a child of 1; a dead end in the last word's bits.
  const int32_t tree = w.put({w.table({1, 0, 3, 0, 5, 0, 11, 0})});
  const int32_t window = w.put({op(RuleOp::kCausal), op(RuleOp::kSlidingWindow), windows, 1,
                                op(RuleOp::kAnd), op(RuleOp::kSink), sinks, 0, op(RuleOp::kOr), 0});
  w.set(0, window, 0);
  w.set(1, w.put({op(RuleOp::kItems), prefix, 0, items, 0, 0}), 0);
  w.set(2, w.put({op(RuleOp::kTree), tree, 0, 0}), 4);
  w.set(3,
        w.put({op(RuleOp::kDocuments), cuts, 0, op(RuleOp::kCausal), op(RuleOp::kSpans), spans, 0,
               op(RuleOp::kOr), op(RuleOp::kAnd), 0}),
        0);
  w.set(4, window, 0);
  return w;
}

void check(const std::vector<int32_t>& q_lens, const std::vector<int32_t>& kv_lens,
           int64_t rows_more, bool with_positions, unsigned seed) {
  const Words words = program();
  std::vector<int32_t> cu_q{0}, positions;
  for (size_t b = 0; b < q_lens.size(); ++b) {
    cu_q.push_back(cu_q.back() + q_lens[b]);
    for (int32_t i = 0; i < q_lens[b]; ++i) positions.push_back((i * 7 + 3) % kv_lens[b]);
  }
  const int64_t rows = cu_q.back() + rows_more, requests = static_cast<int64_t>(q_lens.size());
  positions.resize(rows);
  MaskRowsParams p{words.words.data(), {cu_q.data(), kv_lens.data(), requests}, nullptr, rows};
  if (with_positions) p.positions = positions.data();
  Outputs want(rows, requests), got(rows, requests);
  const MaskRowsParams on_host = want.put_into(p);
  mask_rows_host(on_host, 0, rows / 2);
  mask_rows_host(on_host, rows / 2, rows);
  for (int64_t b = 0; b < requests; ++b) on_host.fill_request(b);
  const int64_t threads = rows > requests ? rows : requests;
  const auto grid = static_cast<unsigned>((threads + kRowThreads - 1) / kRowThreads);
  emu::run(mask_rows_kernel, {grid, kRowThreads, seed}, got.put_into(p));
  EXPECT(got.intervals == want.intervals);
  EXPECT(got.tail_bits == want.tail_bits);
  EXPECT(got.tail_base == want.tail_base);
  for (int64_t row = cu_q.back(); row < rows; ++row) {
    EXPECT(got.intervals[4 * row + 1] == 0 && got.tail_bits[row] == 0);
  }
}

// Rows that are written out: kept apart from both loops.
void check_some_rows() {
  const Words words = program();
  const std::vector<int32_t> cu_q{0, 1, 2, 5, 6, 6}, kv_lens{9, 40, 12, 100, 3};
  MaskRowsParams p{words.words.data(), {cu_q.data(), kv_lens.data(), 5}, nullptr, 6};
  Outputs got(6, 5);
  emu::run(mask_rows_kernel, {1, kRowThreads}, got.put_into(p));
  const std::vector<int32_t> want{0, 4, 6,  9,  0, 5,  31, 40, 0,  10,  0, 0,
                                  0, 9, 10, 11, 0, 10, 11, 12, 21, 100, 0, 0};
  EXPECT(got.intervals == want);
  EXPECT((got.tail_base == std::vector<int32_t>{9, 40, 8, 100, 3}));
}

}  // namespace

int main() {
  check_some_rows();
  for (const bool with_positions : {false, true}) {
    check({5, 40, 6, 100, 1}, {9, 40, 80, 120, 70}, 0, with_positions, 0);
    check({0, 1, 0, 0, 0}, {9, 40, 80, 120, 1}, 3, with_positions, 5);
    check({130, 0, 4, 200, 33}, {500, 1, 64, 200, 33}, 300, with_positions, 9);
  }
  check({0, 0, 0, 0, 0}, {4, 4, 4, 4, 4}, 0, false, 0);
  return failures();
}
