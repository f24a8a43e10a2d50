#pragma once

#include <cstdint>

#include "common/hd.h"

namespace mk {

// ceil(a / b) for a >= 0, b > 0.
MK_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace mk
