#include "transfer/channel/channel.h"

#include "transfer/channel/rpc_channel.h"

namespace mk::transfer {

std::unique_ptr<RpcChannel> Channel::for_rpc() const { return nullptr; }

}  // namespace mk::transfer
