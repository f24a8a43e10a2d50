#include "transfer/region_table.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>

#include "common/check.h"
#include "transfer/error.h"

namespace mk::transfer {
namespace {

// Covers a copy between two checks, and a process being descheduled in between.
constexpr double kOffersInUseS = 10;
constexpr std::chrono::microseconds kOfferCheckEvery{100};

const Cause kRegionClosed{"a region in use was closed", FailureKind::kClosed};

const char* missing_right(Rights missing) {
  if (missing & kLocalWrite) return "is in read-only memory";
  return missing & kRemoteWrite ? "is in a region that peers may not write"
                                : "is in a region that peers may not read";
}

// How many from range `first` on are inside `outer`: neighbours are usually in the same region.
size_t num_inside(const Ranges& ranges, size_t first, const Range outer) {
  size_t i = first;
  while (i < ranges.count && outer.contains(ranges[i])) ++i;
  return i - first;
}

}  // namespace

std::string describe(const Range& range) {
  return concat("0x", std::hex, range.address, std::dec, " + ", range.num_bytes, " bytes");
}

Pin::~Pin() { table_->unpin(regions_, interrupt_); }

RegionRef RegionTable::add(Region region) {
  const Range range = region.range;
  MK_CHECK(range.num_bytes > 0, "register: buffer must not be empty");
  MK_CHECK(range.num_bytes <= UINT64_MAX - range.address, "register: buffer must end below 2**64");
  const std::lock_guard lock(mutex_);
  MK_CHECK(!closed_, "register: the engine is closed");
  auto other = by_address_.lower_bound(range.address + range.num_bytes);  // the first one behind it
  if (other != by_address_.begin()) {
    const Range& before = std::prev(other)->second->range;
    MK_CHECK(before.address + before.num_bytes <= range.address,
             "register: buffer must not overlap a registered one, got ", describe(range),
             " and there is ", describe(before));
  }
  region.number = ++num_registrations_;
  return by_address_[range.address] = std::make_shared<Region>(std::move(region));
}

std::vector<RegionTable::Listed> RegionTable::list(size_t most) const {
  std::vector<RegionRef> regions = all();
  const auto is_own = [](const RegionRef& region) { return !(region->rights & ~kLocalWrite); };
  regions.erase(std::remove_if(regions.begin(), regions.end(), is_own), regions.end());
  std::sort(regions.begin(), regions.end(),
            [](const RegionRef& a, const RegionRef& b) { return a->number < b->number; });
  if (regions.size() > most) regions.resize(most);
  std::vector<Listed> listed;
  for (const RegionRef& region : regions)
    listed.push_back({region->range, region->rights & ~kLocalWrite, region->device});
  return listed;
}

bool RegionTable::remove(const RegionRef& region) {
  withdraw(region);
  return wait_until_unused(region, Deadline::after(kOffersInUseS));
}

void RegionTable::withdraw(const RegionRef& region) {
  const std::lock_guard lock(mutex_);
  if (!region->open) return;
  region->open = false;
  by_address_.erase(region->range.address);
  for (Interrupt* user : region->users) user->signal(kRegionClosed);
  for (const auto& [board, offer] : region->offers) board->withdraw(offer);
}

bool RegionTable::wait_until_unused(const RegionRef& region, const Deadline& deadline) {
  std::unique_lock lock(mutex_);
  unpinned_.wait(lock, [&] { return region->users.empty(); });
  lock.unlock();
  if (region->on_nics) Nics::remove(*region->on_nics);
  lock.lock();
  while (!release_unused(*region)) {
    if (deadline.passed()) {
      in_use_.push_back(region);
      return false;
    }
    lock.unlock();
    std::this_thread::sleep_for(kOfferCheckEvery);
    lock.lock();
  }
  in_use_.erase(std::remove(in_use_.begin(), in_use_.end(), region), in_use_.end());
  return true;
}

// Whether no offer is left. Under the mutex: a slot on the board may be reused at once by another
// region, whose users must not be mistaken for this one's by another remover.
bool RegionTable::release_unused(Region& region) {
  const auto is_over = [](const auto& item) {
    const auto& [board, offer] = item;
    if (board->in_use(offer)) return false;
    board->release(offer);
    return true;
  };
  auto& offers = region.offers;
  offers.erase(std::remove_if(offers.begin(), offers.end(), is_over), offers.end());
  return offers.empty();
}

std::vector<RegionTable::Offered> RegionTable::offer(const std::shared_ptr<Board>& board) {
  std::vector<Offered> offered;
  const std::lock_guard lock(mutex_);
  for (const auto& [address, region] : by_address_) {
    auto& offers = region->offers;
    auto known = std::find_if(offers.begin(), offers.end(),
                              [&](const auto& item) { return item.first == board; });
    if (known == offers.end()) {
      const Offer made = board->offer();
      if (made.generation == 0) break;  // regions without an offer use the connection
      known = offers.insert(offers.end(), {board, made});
    }
    offered.push_back({region->range, region->rights, region->device, known->second});
  }
  return offered;
}

void RegionTable::forget(const std::shared_ptr<Board>& board) {
  const std::lock_guard lock(mutex_);
  for (const auto& [address, region] : by_address_) {
    auto& offers = region->offers;
    const auto is_over = [&](const auto& item) {
      if (item.first != board) return false;
      board->withdraw(item.second);
      return !board->in_use(item.second);
    };
    offers.erase(std::remove_if(offers.begin(), offers.end(), is_over), offers.end());
  }
}

bool RegionTable::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  // One deadline for all: a peer that was stopped in a copy may hold many regions.
  const std::vector<RegionRef> regions = all();
  for (const RegionRef& region : regions) withdraw(region);
  const Deadline deadline = Deadline::after(kOffersInUseS);
  for (const RegionRef& region : regions) wait_until_unused(region, deadline);
  const std::lock_guard lock(mutex_);
  const auto uses = [](const auto& item) { return item.first->in_use(item.second); };
  return std::none_of(in_use_.begin(), in_use_.end(), [&](const RegionRef& region) {
    return std::any_of(region->offers.begin(), region->offers.end(), uses);
  });
}

std::vector<RegionRef> RegionTable::all() const {
  std::vector<RegionRef> regions;
  const std::lock_guard lock(mutex_);
  for (const auto& [address, region] : by_address_) regions.push_back(region);
  return regions;
}

std::vector<RegionRef> RegionTable::around(const std::vector<uint64_t>& addresses) const {
  std::map<uint64_t, RegionRef> found;
  const std::lock_guard lock(mutex_);
  for (const uint64_t address : addresses) {
    if (const RegionRef* const region = find({address, 1}))
      found[(*region)->range.address] = *region;
  }
  std::vector<RegionRef> regions;
  for (auto& [address, region] : found) regions.push_back(std::move(region));
  return regions;
}

const RegionRef* RegionTable::find(const Range& range) const {
  const auto behind = by_address_.upper_bound(range.address);
  if (behind == by_address_.begin()) return nullptr;
  const RegionRef& region = std::prev(behind)->second;
  return region->range.contains(range) ? &region : nullptr;
}

std::vector<RegionRef> RegionTable::check(const Ranges& ranges, Rights needed, const char* side,
                                          uint64_t first_index) const {
  std::vector<RegionRef> found;
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < ranges.count; i += num_inside(ranges, i, found.back()->range)) {
    const Range range = ranges[i];
    const RegionRef* const region = find(range);
    const char* problem = !region ? "is not inside a registered region" : nullptr;
    if (region && needed & ~(*region)->rights) problem = missing_right(needed & ~(*region)->rights);
    if (problem) {
      throw Refused(concat("descriptors[", first_index + i, "] ", side, " range ", describe(range),
                           " ", problem));
    }
    found.push_back(*region);
  }
  if (found.size() > 1) {
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
  }
  return found;
}

Pin RegionTable::pin(std::vector<RegionRef> regions, Interrupt& interrupt) {
  const std::lock_guard lock(mutex_);
  for (const RegionRef& region : regions) {
    if (!region->open) throw Refused(kRegionClosed);
  }
  for (const RegionRef& region : regions) region->users.push_back(&interrupt);
  return Pin(*this, std::move(regions), interrupt);
}

void RegionTable::unpin(const std::vector<RegionRef>& regions, Interrupt* interrupt) {
  const std::lock_guard lock(mutex_);
  for (const RegionRef& region : regions) {
    std::vector<Interrupt*>& users = region->users;
    users.erase(std::find(users.begin(), users.end(), interrupt));
  }
  unpinned_.notify_all();
}

}  // namespace mk::transfer
