#include "kv/transform_blocks.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "common/element_rows.h"

namespace mk::kv {
namespace {

// The state of one thread for moving rows from src to dst.
class RowTransformer {
 public:
  explicit RowTransformer(const TransformBlocksParams& params)
      : p_(params), rows_(RowFunctions::best()) {
    if (!p_.sums_src()) values_.resize(p_.dim);
  }

  void transform(int64_t piece, int64_t plane, float scale, const Run& row) {
    if (p_.is_plain(plane)) {
      std::memcpy(row.dst, row.src, p_.src_row_bytes);
      return;
    }
    float* const values = values_.data();
    rows_.load(p_.src_type, row.src, p_.dim, values);
    if (p_.dequantizes()) rows_.multiply(values, p_.dim, scale);
    if (p_.rotates(plane)) rows_.rotate(p_.rotation, p_.rotation.of(piece), values);
    if (p_.quantizes()) rows_.divide(values, p_.dim, scale);
    rows_.store(p_.dst_type, values, p_.dim, row.dst);
  }

  // Transforms all rows of a piece in a plane.
  void transform(int64_t piece, int64_t plane, int64_t src_offset, int64_t dst_offset) {
    uint64_t sum = 0;
    // In the order of src's memory: rows of one head can be a page apart.
    const bool by_token = p_.copy.axes[1].src_stride > p_.copy.axes[0].src_stride;
    for (int64_t r = 0; r < p_.num_rows(); ++r) {
      const int64_t head = by_token ? r % p_.num_heads() : r / p_.num_tokens();
      const int64_t token = by_token ? r / p_.num_heads() : r % p_.num_tokens();
      const Run row = p_.copy.run(p_.copy.planes[plane], src_offset, dst_offset, head, token);
      if (!p_.sums_src()) transform(piece, plane, p_.scale(plane, head), row);
      if (!p_.sums) continue;
      sum += rows_.sum(p_.sums_src() ? row.src : row.dst, p_.summed_row_bytes(),
                       p_.word_index(piece, plane, head, token));
    }
    if (!p_.sums) return;
    int64_t* const total = p_.sums + p_.summed_side().index(piece);
    __atomic_fetch_add(total, static_cast<int64_t>(sum), __ATOMIC_RELAXED);
  }

 private:
  const TransformBlocksParams& p_;
  const RowFunctions& rows_;
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
    const int64_t src_id = p.copy.src.id(piece), dst_id = p.copy.dst.id(piece);
    if (src_id == kHole || dst_id == kHole) continue;
    const int64_t src_offset = p.copy.src.offset(piece, src_id);
    const int64_t dst_offset = p.copy.dst.offset(piece, dst_id);
    for (int64_t plane = from; plane < last; ++plane) {
      rows.transform(piece, plane, src_offset, dst_offset);
    }
  }
}

}  // namespace mk::kv
