// Attention with vectors that every processor supports.
#include <cmath>
#include <utility>

#include "attention/paged_attention.h"
#include "common/element_rows.h"

#define MK_LANES 4
#define MK_PAIRS 0

namespace mk::attention {
namespace {
#include "attention/isa/functions.h"
}  // namespace

const AttendFunctions* AttendFunctions::portable() { return &kFunctions; }

}  // namespace mk::attention
