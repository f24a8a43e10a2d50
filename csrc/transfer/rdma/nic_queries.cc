#include "transfer/rdma/nic_queries.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "transfer/base/error.h"

namespace mk::transfer {

std::vector<char> NicQueries::query(Op op, const void* query, size_t num_bytes, size_t entry_bytes,
                                    const Limit& limit) {
  BatchHeader header{op, 0, ++count_, 0, num_bytes};
  iovec parts[] = {{&header, sizeof(header)}, {const_cast<void*>(query), num_bytes}};
  sign(socket_.frame_macs(), header, {parts[1]});
  socket_.send(parts, num_bytes > 0 ? 2 : 1, limit);
  Ack ack;
  socket_.receive(&ack, sizeof(ack), limit);
  check_response(ack, count_, entry_bytes, kMaxKeysBytes);
  std::vector<char> answer(ack.status == Status::kDone ? ack.num_bytes : ack.refusal_bytes);
  socket_.receive(answer.data(), answer.size(), limit);
  verify(socket_.frame_macs(), ack, {{answer.data(), answer.size()}});
  if (ack.status == Status::kRefused) {
    throw Refused(ErrorReason(printable(std::string(answer.begin(), answer.end())),
                              kind_of_peer(static_cast<FailureKind>(ack.refusal_kind))));
  }
  return answer;
}

std::vector<NicEntry> NicQueries::nics(const Limit& limit) {
  const std::vector<char> answer = query(Op::kNics, nullptr, 0, sizeof(NicEntry), limit);
  std::vector<NicEntry> nics(std::min(answer.size() / sizeof(NicEntry), kMaxNics));
  if (!nics.empty()) std::memcpy(nics.data(), answer.data(), nics.size() * sizeof(NicEntry));
  return nics;
}

rdma::Endpoint NicQueries::attach(size_t rail, size_t nic, const rdma::Endpoint& ours,
                                  const Limit& limit) {
  const AttachRequest request{static_cast<uint32_t>(rail), static_cast<uint32_t>(nic),
                              entry_of(ours)};
  QueuePairEntry entry{};
  const auto answer = query(Op::kAttach, &request, sizeof(request), sizeof(entry), limit);
  if (answer.size() != sizeof(entry)) throw Failure(protocol_error("no queue pair"));
  std::memcpy(&entry, answer.data(), sizeof(entry));
  return endpoint_of(entry);
}

void NicQueries::detach(size_t rail, const Limit& limit) {
  const DetachRequest request{static_cast<uint32_t>(rail), 0};
  query(Op::kDetach, &request, sizeof(request), 1, limit);
}

std::vector<RemoteRegion> NicQueries::keys(const std::vector<uint64_t>& addresses, size_t num_nics,
                                           const Limit& limit) {
  const size_t num_bytes = addresses.size() * sizeof(uint64_t);
  return parse_keys(query(Op::kKeys, addresses.data(), num_bytes, 1, limit), num_nics);
}

void NicQueries::flush(const std::vector<uint32_t>& rails, const Limit& limit) {
  query(Op::kFlush, rails.data(), rails.size() * sizeof(uint32_t), 1, limit);
}

}  // namespace mk::transfer
