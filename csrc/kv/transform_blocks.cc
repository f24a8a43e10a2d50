#include "kv/transform_blocks.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/element_rows.h"
#include "common/run_copier.h"

namespace mk::kv {
namespace {

constexpr int64_t kLineBytes = 64;
constexpr int64_t kBytesAhead = 8192;  // prefetched, as the processor does it only within a page

// The rows of a piece in sweeps: a sweep has one place along the outer of the axes head and token,
// and all of the inner one, in the order of src's memory (rows of one head can be a page apart).
struct Sweeps {
  explicit Sweeps(const TransformBlocksParams& p)
      : outer(p.copy.axes[1].src_stride > p.copy.axes[0].src_stride ? 1 : 0),
        length(p.copy.axes[1 - outer].extent),
        num_outer(p.copy.axes[outer].extent),
        src_stride(p.copy.axes[1 - outer].src_stride),
        dst_stride(p.copy.axes[1 - outer].dst_stride),
        are_packed(src_stride == p.src_row_bytes && dst_stride == p.src_row_bytes) {}

  int64_t head(int64_t place, int64_t row) const { return outer == 0 ? place : row; }
  int64_t token(int64_t place, int64_t row) const { return outer == 0 ? row : place; }

  const int outer;                       // which of the axes
  const int64_t length;                  // rows
  const int64_t num_outer;               // sweeps in a plane
  const int64_t src_stride, dst_stride;  // of a row
  const bool are_packed;                 // contiguous on both sides
};

// The state of one thread for moving rows from src to dst.
class RowTransformer {
 public:
  explicit RowTransformer(const TransformBlocksParams& params)
      : p_(params),
        rows_(RowFunctions::best()),
        sweeps_(params),
        sweeps_ahead_(std::max<int64_t>(1, kBytesAhead / (sweeps_.length * p_.src_row_bytes))),
        run_bytes_(p_.src_row_bytes * (sweeps_.are_packed ? sweeps_.length : 1)),
        streams_(p_.copy.num_runs() * p_.src_row_bytes >= stream_from_bytes() &&
                 (p_.copy.dst_bits() | p_.src_row_bytes) % kLineBytes == 0),
        copier_(p_.copy.num_runs() * p_.src_row_bytes, run_bytes_) {
    if (!p_.sums_src()) values_.resize(p_.dim);
  }

  // Transforms all rows of a piece in planes [begin, end).
  void transform(int64_t piece, int64_t begin, int64_t end) {
    const int64_t src_offset = p_.copy.src.offset(piece, p_.copy.src.id(piece));
    const int64_t dst_offset = p_.copy.dst.offset(piece, p_.copy.dst.id(piece));
    const auto run_of = [&](int64_t sweep) {
      const int64_t place = sweep % sweeps_.num_outer;
      return p_.copy.run(p_.copy.planes[sweep / sweeps_.num_outer], src_offset, dst_offset,
                         sweeps_.head(place, 0), sweeps_.token(place, 0));
    };
    uint64_t sum = 0;
    const int64_t last = end * sweeps_.num_outer - 1;
    for (int64_t sweep = begin * sweeps_.num_outer; sweep <= last; ++sweep) {
      const Run ahead = run_of(std::min(sweep + sweeps_ahead_, last));
      sum += transform(piece, sweep / sweeps_.num_outer, sweep % sweeps_.num_outer, run_of(sweep),
                       ahead.src);
    }
    if (!p_.sums) return;
    int64_t* const total = p_.sums + p_.summed_side().index(piece);
    __atomic_fetch_add(total, static_cast<int64_t>(sum), __ATOMIC_RELAXED);
  }

  void finish() {
    copier_.finish();
    if (streams_) fence_streamed_stores();
  }

 private:
  // Transforms a sweep that begins at `run`, and prefetches the one that begins at `next`. Returns
  // its share of the sum.
  uint64_t transform(int64_t piece, int64_t plane, int64_t place, const Run& run,
                     const char* next) {
    if (p_.sums_src()) return sum(piece, plane, place, run.src, sweeps_.src_stride, next);
    if (p_.is_plain(plane)) {
      if (p_.sums && streams_) return copy_and_sum(piece, plane, place, run, next);
      uint64_t total = 0;
      if (p_.sums) total = sum(piece, plane, place, run.src, sweeps_.src_stride, next);
      for (int64_t at = 0; at < sweeps_.length * p_.src_row_bytes; at += run_bytes_) {
        const int64_t row = at / p_.src_row_bytes;
        copier_.add({run.src + row * sweeps_.src_stride, run.dst + row * sweeps_.dst_stride});
      }
      return total;
    }
    for (int64_t row = 0; row < sweeps_.length; ++row) {
      const int64_t at = row * sweeps_.src_stride;
      for (int64_t i = 0; i < p_.src_row_bytes; i += kLineBytes) {
        __builtin_prefetch(next + at + i);
      }
      transform(piece, plane, p_.scale(plane, sweeps_.head(place, row)),
                {run.src + at, run.dst + row * sweeps_.dst_stride});
    }
    return p_.sums ? sum(piece, plane, place, run.dst, sweeps_.dst_stride, run.dst) : 0;
  }

  void transform(int64_t piece, int64_t plane, float scale, const Run& row) {
    float* const values = values_.data();
    rows_.load(p_.src_type, row.src, p_.dim, values);
    if (p_.dequantizes()) rows_.multiply(values, p_.dim, scale);
    if (p_.rotates(plane)) rows_.rotate(p_.rotation, p_.rotation.of(piece), values);
    if (p_.quantizes()) rows_.divide(values, p_.dim, scale);
    rows_.store(p_.dst_type, values, p_.dim, row.dst);
  }

  // The sum of a sweep's rows from `row` on.
  uint64_t sum(int64_t piece, int64_t plane, int64_t place, const char* row, int64_t stride,
               const char* next) const {
    return rows_.sum(summed(piece, plane, place, row, stride, next));
  }
  uint64_t copy_and_sum(int64_t piece, int64_t plane, int64_t place, const Run& run,
                        const char* next) const {
    SummedRows rows = summed(piece, plane, place, run.src, sweeps_.src_stride, next);
    rows.copy = run.dst;
    rows.copy_stride = sweeps_.dst_stride;
    return rows_.copy_and_sum(rows);
  }
  SummedRows summed(int64_t piece, int64_t plane, int64_t place, const char* row, int64_t stride,
                    const char* next) const {
    const auto index = [&](int64_t i) {
      return p_.word_index(piece, plane, sweeps_.head(place, i), sweeps_.token(place, i));
    };
    const uint64_t step = sweeps_.length > 1 ? index(1) - index(0) : 0;
    return {row, p_.summed_row_bytes(), sweeps_.length, stride, index(0), step, next, nullptr, 0};
  }

  const TransformBlocksParams& p_;
  const RowFunctions& rows_;
  const Sweeps sweeps_;
  const int64_t sweeps_ahead_;  // of what is prefetched
  const int64_t run_bytes_;     // of plain rows: a sweep, if it is contiguous, or a row
  const bool streams_;          // sums are added up while rows are copied, past the cache
  RunCopier copier_;
  std::vector<float> values_;  // a row
};

}  // namespace

void transform_blocks_host(const TransformBlocksParams& p, int64_t begin, int64_t end) {
  RowTransformer rows(p);
  int64_t first = begin % p.copy.num_planes;
  for (int64_t piece = begin / p.copy.num_planes; begin < end; ++piece) {
    const int64_t last = std::min<int64_t>(p.copy.num_planes, first + end - begin);
    const int64_t from = std::exchange(first, 0);
    begin += last - from;
    if (p.copy.src.id(piece) == kHole || p.copy.dst.id(piece) == kHole) continue;
    rows.transform(piece, from, last);
  }
  rows.finish();
}

}  // namespace mk::kv
