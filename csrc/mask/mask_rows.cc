#include "mask/mask_rows.h"

namespace mk::mask {

void mask_rows_host(const MaskRowsParams& params, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) params.fill_row(row);
}

}  // namespace mk::mask
