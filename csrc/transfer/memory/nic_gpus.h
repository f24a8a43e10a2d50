// Makes what NICs have written to GPU memory visible to the GPU work that begins from then on.
//
//   flush_gpus(regions);   // those of them that NICs can write to
//
// Layer: transfer.
#pragma once

#include <vector>

#include "transfer/memory/region_table.h"

namespace mk::transfer {

// Throws Refused: a GPU neither orders NICs' writes nor supports flushing them.
void flush_gpus(const std::vector<RegionRef>& regions);

}  // namespace mk::transfer
