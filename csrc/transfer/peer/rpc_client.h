// RpcClient: calls a peer's Service over connections of its own, each of which carries one call at
// a time: calls do not wait for transfers, nor transfers for calls.
//
//   const std::unique_ptr<RpcResponse> response = client->call(request, Deadline::after(5.0));
//   response->receive(parts, Deadline::after(30.0));   // and so on, until num_left() is 0
//
// Layer: transfer. Thread-safe; an RpcResponse is for one thread at a time.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/owner.h"
#include "transfer/channel/rpc_channel.h"
#include "transfer/net/connection_pool.h"
#include "transfer/request/counters.h"

namespace mk::transfer {

class RpcClient;

struct RpcRequest {
  const char* op;              // its name in errors
  std::string message;         // 1 to kMaxRpcRequestBytes
  std::vector<iovec> payload;  // follows it; kMaxRpcPayloadBytes at most
  bool may_repeat;             // see RpcClient::call
};

// A response being received. Throws TransferError.
class RpcResponse {
 public:
  RpcResponse(const RpcResponse&) = delete;
  ~RpcResponse();  // what was not received is lost, together with its connection

  uint64_t num_left() const { return num_left_; }
  // At most num_left() bytes; parts without an address are discarded.
  void receive(const std::vector<iovec>& parts, const Deadline& deadline);

 private:
  friend class RpcClient;
  class Connection;
  RpcResponse(std::shared_ptr<RpcClient> client, Connection& connection, uint64_t payload_bytes);

  const std::shared_ptr<RpcClient> client_;
  Connection& connection_;
  Counted counted_;
  const uint64_t payload_bytes_;
  bool has_failed_ = true;  // until the peer begins to respond
  uint64_t num_left_ = 0;
  uint64_t num_received_ = 0;
};

class RpcClient : public std::enable_shared_from_this<RpcClient> {
 public:
  using MakeChannel = std::function<std::unique_ptr<RpcChannel>()>;  // as Channel::for_rpc()

  RpcClient(std::string peer, MakeChannel make, std::shared_ptr<ConnectionPool> pool,
            CountersRef counters);
  ~RpcClient();

  // Returns once the peer has begun to respond. `may_repeat`: to call twice does no harm, for the
  // case that a connection turns out to have ended. Throws TransferError; Unavailable: the peer
  // refuses.
  std::unique_ptr<RpcResponse> call(const RpcRequest& request, const Deadline& deadline);

  // Ends all calls in progress, and refuses further ones.
  void interrupt(const ErrorReason& reason) { interrupt_.signal(reason); }
  void close();  // the same, and closes idle connections; the others end with their responses

 private:
  friend class RpcResponse;
  using Connection = RpcResponse::Connection;

  Connection& take(const char* op);
  uint64_t begin(Connection& connection, bool is_connected, const RpcRequest& request,
                 const Limit& limit);
  void give_back(Connection& connection, bool is_good);
  [[noreturn]] void fail(RpcResponse& response, const ErrorReason& reason) const;

  const std::string peer_;
  const MakeChannel make_;
  const std::shared_ptr<ConnectionPool> pool_;
  const CountersRef counters_;
  const Owner owner_;
  Interrupt interrupt_;
  std::mutex mutex_;
  bool closed_ = false;
  std::vector<std::unique_ptr<Connection>> connections_;
};

}  // namespace mk::transfer
