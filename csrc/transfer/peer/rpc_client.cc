#include "transfer/peer/rpc_client.h"

#include <algorithm>
#include <utility>

#include "transfer/base/error.h"
#include "transfer/wire/wire.h"

namespace mk::transfer {
namespace {

constexpr char kNoRpc[] = "this transport has no channel for RPC";
constexpr size_t kScratchBytes = 64 << 10;  // for what is discarded

}  // namespace

class RpcResponse::Connection final : public Connected {
 public:
  Connection(std::unique_ptr<RpcChannel> channel, PathCounters& counters)
      : channel(std::move(channel)), counters(counters) {}

  bool take() { return !is_taken_.exchange(true); }
  void let_go() { is_taken_ = false; }

  bool try_disconnect() override {
    if (!take()) return false;
    channel->disconnect();
    let_go();
    return true;
  }

  const std::unique_ptr<RpcChannel> channel;
  PathCounters& counters;

 private:
  std::atomic<bool> is_taken_{true};  // initially by its creator
};

RpcResponse::RpcResponse(std::shared_ptr<RpcClient> client, Connection& connection,
                         uint64_t payload_bytes)
    : client_(std::move(client)),
      connection_(connection),
      counted_(client_->counters_, payload_bytes > 0 ? Direction::kWrite : Direction::kRead,
               payload_bytes),
      payload_bytes_(payload_bytes) {}

RpcResponse::~RpcResponse() {
  if (client_->owner_.forked()) return;  // the connection is the parent's
  PathCounters& path = connection_.counters;
  const bool writes = payload_bytes_ > 0;  // then the response is not counted
  const uint64_t num_bytes = writes ? (has_failed_ ? 0 : payload_bytes_) : num_received_;
  (writes ? path.num_bytes_written : path.num_bytes_read) += num_bytes;
  if (num_bytes > 0) path.num_pieces += 1;
  counted_.end(num_bytes, has_failed_);
  client_->give_back(connection_, num_left_ == 0);
}

void RpcResponse::receive(const std::vector<iovec>& parts, const Deadline& deadline) {
  client_->owner_.check("receive", "reply");
  std::vector<char> scratch;
  std::vector<iovec> all;
  uint64_t num_bytes = 0;
  for (const iovec& part : parts) {
    num_bytes += part.iov_len;
    if (part.iov_base) {
      all.push_back(part);
      continue;
    }
    scratch.resize(kScratchBytes);  // once, so that it is never moved
    for (size_t done = 0; done < part.iov_len; done += kScratchBytes) {
      all.push_back({scratch.data(), std::min(part.iov_len - done, kScratchBytes)});
    }
  }
  MK_CHECK(num_bytes <= num_left_, "receive: parts must be at most the ", num_left_,
           " bytes that are left, got ", num_bytes);
  try {
    connection_.channel->receive_response(all.data(), all.size(), {deadline, client_->interrupt_});
  } catch (const Inaccessible& fault) {
    num_left_ -= num_bytes;
    client_->fail(*this, fault.of("local "));
  } catch (const std::exception& error) {
    client_->fail(*this, reason_of(error));
  }
  num_left_ -= num_bytes;
  num_received_ += num_bytes;
}

RpcClient::RpcClient(std::string peer, MakeChannel make, std::shared_ptr<ConnectionPool> pool,
                     CountersRef counters)
    : peer_(std::move(peer)),
      make_(std::move(make)),
      pool_(std::move(pool)),
      counters_(std::move(counters)) {}

RpcClient::~RpcClient() {
  if (!owner_.forked()) close();
}

std::unique_ptr<RpcResponse> RpcClient::call(const RpcRequest& request, const Deadline& deadline) {
  MK_CHECK(!request.message.empty() && request.message.size() <= kMaxRpcRequestBytes, request.op,
           ": request must be 1 to ", kMaxRpcRequestBytes, " bytes, got ", request.message.size());
  uint64_t num_bytes = 0;
  for (const iovec& part : request.payload) num_bytes += part.iov_len;
  MK_CHECK(num_bytes <= kMaxRpcPayloadBytes, request.op, ": payload must be at most ",
           kMaxRpcPayloadBytes, " bytes, got ", num_bytes);
  Connection& connection = take(request.op);
  std::unique_ptr<RpcResponse> response(new RpcResponse(shared_from_this(), connection, num_bytes));
  response->num_left_ = kMaxRpcResponseBytes;  // unknown yet; on failure the connection is lost
  const Limit limit{deadline, interrupt_};
  try {
    interrupt_.check();
    const bool was_connected = connection.channel->connected();
    try {
      response->num_left_ = begin(connection, was_connected, request, limit);
    } catch (const LinkDown&) {
      if (!was_connected || !request.may_repeat) throw;  // else it had closed unnoticed
      response->num_left_ = begin(connection, false, request, limit);
    }
  } catch (const Refused& refused) {
    response->num_left_ = 0;
    // What may pass is a failure; what the peer does not do, it does not.
    if (refused.kind == FailureKind::kExhausted || refused.kind == FailureKind::kInaccessible ||
        refused.kind == FailureKind::kDevice) {
      throw TransferError(peer_, refused.reason());
    }
    throw Unavailable(concat(request.op, ": ", peer_, ": ", refused.what()));
  } catch (const Inaccessible& fault) {
    fail(*response, fault.of("local "));
  } catch (const std::exception& error) {
    fail(*response, reason_of(error));
  }
  response->has_failed_ = false;
  return response;
}

uint64_t RpcClient::begin(Connection& connection, bool is_connected, const RpcRequest& request,
                          const Limit& limit) {
  if (!is_connected) {
    connection.channel->disconnect();
    pool_->enter(connection, limit);
    connection.channel->connect(limit);
  }
  connection.visited.store(true, std::memory_order_relaxed);
  return connection.channel->call(request.message, request.payload, limit);
}

void RpcClient::close() {
  interrupt_.signal({"the peer was closed", FailureKind::kClosed});
  const std::lock_guard lock(mutex_);
  closed_ = true;
  for (const auto& connection : connections_) {
    pool_->leave(*connection);  // first: the pool may be about to disconnect it
    if (connection->take()) connection->channel->close();  // else its RpcResponse closes it
  }
}

RpcResponse::Connection& RpcClient::take(const char* op) {
  const std::lock_guard lock(mutex_);
  if (closed_) throw TransferError(peer_, {"the peer was closed", FailureKind::kClosed});
  for (const auto& connection : connections_) {
    if (connection->take()) return *connection;
  }
  std::unique_ptr<RpcChannel> channel;
  try {
    channel = make_();
  } catch (const std::exception& error) {
    throw TransferError(peer_, reason_of(error));
  }
  if (!channel) throw Unavailable(concat(op, ": ", peer_, ": ", kNoRpc));
  return *connections_.emplace_back(
      std::make_unique<Connection>(std::move(channel), counters_->path("rpc")));
}

void RpcClient::give_back(Connection& connection, bool is_good) {
  const std::lock_guard lock(mutex_);
  if (!is_good || closed_) {
    closed_ ? connection.channel->close() : connection.channel->disconnect();
    pool_->leave(connection);
  }
  if (!closed_) connection.let_go();
}

void RpcClient::fail(RpcResponse& response, const ErrorReason& reason) const {
  response.has_failed_ = true;
  throw TransferError(peer_, reason, response.num_received_);
}

}  // namespace mk::transfer
