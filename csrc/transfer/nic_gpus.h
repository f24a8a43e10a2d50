// What NICs have written to memory of GPUs, made visible to what these begin from then on.
//
//   flush_gpus(regions);   // those of them that NICs can write to
//
// Layer: transfer.
#pragma once

#include <vector>

#include "transfer/region_table.h"

namespace mk::transfer {

// Throws Refused: a GPU neither orders the writes of NICs nor can they be flushed.
void flush_gpus(const std::vector<RegionRef>& regions);

}  // namespace mk::transfer
