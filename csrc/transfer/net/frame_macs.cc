#include "transfer/net/frame_macs.h"

#include "transfer/net/secret.h"

namespace mk::transfer {

void FrameMacs::check_received(const iovec& header, Covered covered, const Bytes32& mac) {
  if (!equal(next(receiving_, header, covered), mac)) throw Forged();
}

// The header says how long each of the parts is, so that no two frames have the same input.
Bytes32 FrameMacs::next(Direction& direction, const iovec& header, Covered covered) {
  const uint64_t number = ++direction.num_frames;
  input_.assign(reinterpret_cast<const char*>(&number), sizeof(number));
  input_.append(static_cast<const char*>(header.iov_base), header.iov_len);
  for (const iovec& part : covered) {
    input_.append(static_cast<const char*>(part.iov_base), part.iov_len);
  }
  return hmac(direction.key.data(), direction.key.size(), input_);
}

}  // namespace mk::transfer
