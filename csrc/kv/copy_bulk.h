// copy_blocks by bulk copies (TMA): one thread of each thread block keeps a ring of stages in
// shared memory full. Not yet run on a GPU. Layer: kv.
#pragma once

#include "kv/copy_blocks.h"

namespace mk::kv {

// As launch_copy_blocks, for runs whose addresses and sizes are multiples of 16 bytes. A thread
// block has a multiprocessor to itself. Throws Unavailable below compute capability 9.0,
// InvalidArgument for other runs, and CudaError.
void launch_copy_bulk(const CopyBlocksParams& params, BadId* bad, int max_sms, void* stream);

}  // namespace mk::kv
