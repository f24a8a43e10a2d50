#include "transfer/session.h"

#include <exception>
#include <utility>

#include "transfer/error.h"
#include "transfer/piece.h"
#include "transfer/verdict.h"

namespace mk::transfer {
namespace {

constexpr double kGreetingS = 10;  // for the handshake, once connected
constexpr double kLingerS = 1;     // to read why we turn a peer away
constexpr double kBatchS = 60;     // to send the rest of a batch, or take in what it asked for

}  // namespace

void Session::run() noexcept {
  try {
    const Links::Hold hold = greet();  // while memory may be touched
    serve_all();
  } catch (const std::exception&) {
    // It never got in.
  }
  socket_.close();
  if (board_) {
    board_->end();
    own_.regions.forget(board_);
  }
  finished_ = true;
}

void Session::serve_all() {
  try {
    while (true) serve_next();
  } catch (const std::exception&) {
    // The peer left, or cannot be understood. It learns so from the connection's end.
  }
  rdma_.close();
}

Links::Hold Session::greet() {
  const Limit limit{Deadline::after(kGreetingS), interrupt_};
  Reception reception(socket_, own_, limit);
  try {
    return let_in(reception, limit);
  } catch (const Failure& failure) {
    // Who only looks whether somebody listens here is nobody that we turned away.
    if (!dynamic_cast<const LinkDown*>(&failure)) own_.rejections.count(failure.what());
    if (const auto* rejected = dynamic_cast<const Rejected*>(&failure)) {
      reception.reject(rejected->verdict);
    }
    socket_.linger({Deadline::after(kLingerS), interrupt_});
    throw;
  }
}

Links::Hold Session::let_in(Reception& reception, const Limit& limit) {
  const Greeting& peer = reception.meet();
  visit_.admit();
  link_ = {peer.hello.instance, peer.tail.link.id};
  Links::Hold hold = gate_.links.enter(link_, peer.tail.link.epoch, interrupt_, limit);
  peer_name_ = peer.name;
  reception.welcome();
  return hold;
}

void Session::serve_next() {
  BatchHeader header;
  char* const start = reinterpret_cast<char*>(&header);
  socket_.receive(start, 1, {Deadline::never(), interrupt_});  // a connection may idle
  const Limit limit{Deadline::after(kBatchS), interrupt_};
  socket_.receive(start + 1, sizeof(header) - 1, limit);
  check_header(header);
  table_.resize(header.num_ranges);
  socket_.receive(table_.data(), table_.size() * sizeof(Range), limit);
  check_table(header, table_.data());
  serve(header, limit);
}

void Session::serve(const BatchHeader& header, const Limit& limit) {
  switch (header.op) {
    case Op::kWrite:
      return receive_write(header, limit);
    case Op::kRead:
      return send_read(header, limit);
    case Op::kNotify:
      return receive_notification(header, limit);
    case Op::kRegions:
      return send_regions(header, limit);
    case Op::kFence:
      return end_links(header, limit);
    case Op::kNics:
    case Op::kAttach:
    case Op::kDetach:
    case Op::kKeys:
    case Op::kFlush:
      return answer_about_nics(header, limit);
    case Op::kList:
      return send_list(header, limit);
    case Op::kCheckWrite:
    case Op::kCheckRead:
      break;
  }
  try {
    check(header, header.op == Op::kCheckWrite ? kRemoteWrite : kRemoteRead);
  } catch (const Refused& refused) {
    return refuse(header, refused.what(), limit);
  }
  acknowledge(header, limit);
}

void Session::receive_write(const BatchHeader& header, const Limit& limit) {
  try {
    const Pin pin = own_.regions.pin(check(header, kRemoteWrite), interrupt_);
    std::vector<iovec>& parts = parts_of_table();
    socket_.receive(parts.data(), parts.size(), limit);
  } catch (const Refused& refused) {  // thrown before the first byte of payload was received
    socket_.discard(header.num_bytes, limit);
    return refuse(header, refused.what(), limit);
  }
  acknowledge(header, limit);
}

void Session::send_read(const BatchHeader& header, const Limit& limit) {
  try {
    const Pin pin = own_.regions.pin(check(header, kRemoteRead), interrupt_);
    Ack ack{Status::kDone, 0, header.request_id, header.num_bytes};
    std::vector<iovec>& parts = parts_of_table();
    parts.insert(parts.begin(), {&ack, sizeof(ack)});
    socket_.send(parts.data(), parts.size(), limit);
  } catch (const Refused& refused) {
    refuse(header, refused.what(), limit);
  }
}

void Session::receive_notification(const BatchHeader& header, const Limit& limit) {
  std::string bytes(header.num_bytes, '\0');
  socket_.receive(bytes.data(), bytes.size(), limit);
  try {
    check(header, 0);
    own_.notifications.push(peer_name_, std::move(bytes));
  } catch (const Refused& refused) {
    return refuse(header, refused.what(), limit);
  }
  acknowledge(header, limit);
}

void Session::send_regions(const BatchHeader& header, const Limit& limit) {
  if (socket_.peer_process() == 0) throw Failure("regions are not told to another machine or user");
  const bool first = !board_;
  if (first) board_ = std::make_shared<Board>();
  std::vector<RegionEntry> entries;
  std::vector<Fd> memories;
  std::map<uint64_t, uint32_t> told;
  for (const RegionTable::Offered& offered : own_.regions.offer(board_)) {
    const Range& range = offered.range;
    RegionEntry& entry =
        entries.emplace_back(RegionEntry{range.address, range.num_bytes, offered.offer.generation,
                                         0, offered.offer.slot, offered.rights, kNoMemory, 0});
    auto part = SharedMemory::find(range.address, range.num_bytes);
    if (!part) continue;
    const auto known = sent_memories_.find(part->id);
    const bool is_new = known == sent_memories_.end() && !told.count(part->id);
    if (known != sent_memories_.end()) told.insert(*known);
    if (is_new) {
      told.emplace(part->id, num_memories_sent_++);
      memories.push_back(std::move(part->fd));
    }
    entry.memory = told.at(part->id);
    entry.offset = part->offset;
  }
  sent_memories_ = std::move(told);  // the initiator has let go of the others, too
  Ack ack{Status::kDone, 0, header.request_id, entries.size() * sizeof(RegionEntry)};
  iovec parts[] = {{&ack, sizeof(ack)}, {entries.data(), ack.num_bytes}};
  socket_.send(parts, 2, limit);
  if (first) socket_.send_fd(board_->fd(), limit);
  for (const Fd& memory : memories) socket_.send_fd(memory, limit);
}

void Session::end_links(const BatchHeader& header, const Limit& limit) {
  std::vector<Link> links(header.num_bytes / sizeof(Link));
  socket_.receive(links.data(), header.num_bytes, limit);
  try {
    for (const Link& link : links) {
      if (link.id == link_.link) throw Failure("protocol error: a connection that fences itself");
      gate_.links.fence({link_.instance, link.id}, link.epoch, limit);
    }
  } catch (const Refused& refused) {
    return refuse(header, refused.what(), limit);
  }
  acknowledge(header, limit);
}

void Session::answer_about_nics(const BatchHeader& header, const Limit& limit) {
  std::vector<char> question(header.num_bytes);
  socket_.receive(question.data(), question.size(), limit);
  std::string answer;
  try {
    answer = rdma_.answer(header.op, question, limit);
  } catch (const Refused& refused) {
    return refuse(header, refused.what(), limit);
  }
  Ack ack{Status::kDone, 0, header.request_id, answer.size()};
  iovec parts[] = {{&ack, sizeof(ack)}, {answer.data(), answer.size()}};
  socket_.send(parts, answer.empty() ? 1 : 2, limit);
}

void Session::send_list(const BatchHeader& header, const Limit& limit) {
  const bool is_known = own_.credentials.secret || socket_.peer_process() != 0;
  if (!is_known) {
    return refuse(header, "regions are told to who knows a secret or is of this machine and user",
                  limit);
  }
  std::vector<ListEntry> entries;
  for (const auto& [range, rights] : own_.regions.list(kMaxListed)) {
    entries.push_back({range.address, range.num_bytes, rights, 0});
  }
  Ack ack{Status::kDone, 0, header.request_id, entries.size() * sizeof(ListEntry)};
  iovec parts[] = {{&ack, sizeof(ack)}, {entries.data(), ack.num_bytes}};
  socket_.send(parts, entries.empty() ? 1 : 2, limit);
}

std::vector<RegionRef> Session::check(const BatchHeader& header, Rights needed) const {
  if (header.request_id == refused_request_) {
    throw Refused("an earlier batch of the request was refused");
  }
  return own_.regions.check(Ranges::rows(table_), needed, "remote", header.first_range);
}

std::vector<iovec>& Session::parts_of_table() {
  parts_.clear();
  for (const Range& range : table_) append_part(parts_, range.address, range.num_bytes);
  return parts_;
}

void Session::acknowledge(const BatchHeader& header, const Limit& limit) {
  const Ack ack{Status::kDone, 0, header.request_id, header.num_bytes};
  socket_.send(&ack, sizeof(ack), limit);
}

void Session::refuse(const BatchHeader& header, const std::string& why, const Limit& limit) {
  const bool is_of_request = header.op <= Op::kNotify;  // what comes behind are questions
  if (is_of_request) refused_request_ = header.request_id;
  const std::string text = why.substr(0, kMaxRefusalBytes);
  Ack ack{Status::kRefused, static_cast<uint32_t>(text.size()), header.request_id, 0};
  iovec parts[] = {{&ack, sizeof(ack)}, {const_cast<char*>(text.data()), text.size()}};
  socket_.send(parts, 2, limit);
}

}  // namespace mk::transfer
