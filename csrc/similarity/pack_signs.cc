#include "similarity/pack_signs.h"

namespace mk::similarity {

void pack_signs_host(const PackSignsParams& p, int64_t begin, int64_t end) {
  for (int64_t byte = begin; byte < end; ++byte) {
    unsigned bits = 0;
    for (int i = 0; i < 8; ++i) bits |= unsigned{p.is_set(8 * byte + i)} << i;
    p.packed[byte] = static_cast<uint8_t>(bits);
  }
}

}  // namespace mk::similarity
