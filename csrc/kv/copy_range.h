// CopyRange: so many bytes from here to there.
#pragma once

#include <cstdint>

namespace mk::kv {

struct CopyRange {
  const char* src;
  char* dst;
  int64_t num_bytes;
};

}  // namespace mk::kv
