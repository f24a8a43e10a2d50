// Everything for an instruction set, in the only possible include order. Layer: attention.

// clang-format off
#include "attention/isa/vectors.h"
#include "attention/isa/products.h"
#include "attention/isa/pack.h"
#include "attention/isa/softmax.h"
#include "attention/isa/attend.h"
// clang-format on

static constexpr AttendFunctions kFunctions{attend, merge};
