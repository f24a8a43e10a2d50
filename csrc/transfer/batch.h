// BatchCursor: walks over a request in batches that fit the wire's limits.
//
//   BatchCursor cursor(request);
//   for (Batch batch; cursor.next(batch);) send(batch.remote, batch.local);
//
// Layer: transfer. A descriptor that is larger than a batch is continued in the next one.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "transfer/request.h"

namespace mk::transfer {

struct Batch {
  uint64_t first_range = 0;  // index in the request
  uint64_t num_bytes = 0;
  std::vector<Range> remote;
  std::vector<iovec> local;  // the same bytes in the same order; neighbours are merged
};

class BatchCursor {
 public:
  explicit BatchCursor(const Request& request);

  bool next(Batch& batch);  // false at the end

 private:
  const Request& request_;
  const uint64_t max_bytes_;
  size_t index_ = 0;     // of the descriptor
  uint64_t offset_ = 0;  // in it
};

bool fits_one_batch(const Request& request);

// Adds memory to the end of a list, lengthening the last part where it goes on.
void append_part(std::vector<iovec>& parts, uint64_t address, uint64_t num_bytes);

}  // namespace mk::transfer
