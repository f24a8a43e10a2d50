// What a session tells about its engine's regions.
#include <utility>

#include "transfer/base/error.h"
#include "transfer/gpu/gpu_mapping.h"
#include "transfer/server/session.h"

namespace mk::transfer {
namespace {

constexpr char kStrangers[] = "regions are not told to another machine or user";
constexpr char kNotListed[] =
    "regions are listed only to peers with the secret, or of the same machine and user";

}  // namespace

void Session::send_regions(const BatchHeader& header, const Limit& limit) {
  const pid_t initiator = socket_.peer_process();
  if (initiator == 0) throw Failure(kStrangers, FailureKind::kDenied);
  const bool first = !page_;
  if (first) {
    page_ = std::make_shared<ControlPage>(initiator);
    liveness_.emplace(page_->liveness());
  }
  std::vector<RegionEntry> entries;
  std::vector<Fd> memories;
  std::map<uint64_t, uint32_t> told;
  for (const RegionTable::Offered& offered : own_.regions.offer(page_)) {
    const Range& range = offered.range;
    RegionEntry& entry = entries.emplace_back(
        RegionEntry{range.address, range.num_bytes, offered.offer.generation, 0, offered.offer.slot,
                    offered.rights, kNoMemory, location_of(offered.device)});
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
  sent_memories_ = std::move(told);  // the initiator has released the others, too
  respond(header, entries.data(), entries.size() * sizeof(RegionEntry), limit);
  if (first) socket_.send_fd(page_->fd(), limit);
  for (const Fd& memory : memories) socket_.send_fd(memory, limit);
}

void Session::send_gpus(const BatchHeader& header, const Limit& limit) {
  if (socket_.peer_process() == 0) throw Failure(kStrangers, FailureKind::kDenied);
  std::vector<GpuEntry> entries;
  const auto append = [&](const std::vector<RegionRef>& regions) {
    for (const RegionRef& region : regions) {
      if (region->device < 0 || !(region->rights & ~kLocalWrite)) continue;
      if (entries.size() < ControlPage::kNumSlots) entries.push_back(export_region(*region));
    }
  };
  append(own_.regions.all());
  append(own_.regions.windows());
  respond(header, entries.data(), entries.size() * sizeof(GpuEntry), limit);
}

void Session::send_list(const BatchHeader& header, const Limit& limit) {
  const bool is_known = own_.credentials.secret || socket_.peer_process() != 0;
  if (!is_known) {
    return refuse(header, {kNotListed, FailureKind::kDenied}, limit);
  }
  std::vector<ListEntry> entries;
  for (const auto& [range, rights, device] : own_.regions.list(kMaxListed)) {
    entries.push_back({range.address, range.num_bytes, rights, location_of(device)});
  }
  respond(header, entries.data(), entries.size() * sizeof(ListEntry), limit);
}

}  // namespace mk::transfer
