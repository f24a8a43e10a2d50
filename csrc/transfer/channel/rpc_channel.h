// RpcChannel: a channel that also carries calls of the peer's Service, one at a time.
//
//   uint64_t left = channel.call(request, payload, limit);
//   while (left > 0) channel.receive_response(parts, num_parts, limit);   // subtracts what it
//   fills
//
// Layer: transfer.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "transfer/channel/channel.h"

namespace mk::transfer {

class RpcChannel : public Channel {
 public:
  // The response, of the returned size, must be received completely before anything else.
  // Connected, nothing posted. The parts are used up. Throws as list_regions().
  virtual uint64_t call(const std::string& request, std::vector<iovec> payload,
                        const Limit& limit) = 0;
  virtual void receive_response(iovec* parts, size_t num_parts, const Limit& limit) = 0;
};

}  // namespace mk::transfer
