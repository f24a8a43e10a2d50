#include "transfer/memory/region_table.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <thread>

#include "common/check.h"
#include "transfer/base/error.h"

namespace mk::transfer {
namespace {

// Covers a copy between two checks, and a process being descheduled in between.
constexpr double kOffersInUseS = 10;
constexpr std::chrono::microseconds kOfferCheckEvery{100};

const ErrorReason kRegionClosed{"a region in use was closed", FailureKind::kClosed};

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
  const auto is_own = [](const RegionRef& region) { return !(region->rights & kRemoteRights); };
  regions.erase(std::remove_if(regions.begin(), regions.end(), is_own), regions.end());
  std::sort(regions.begin(), regions.end(),
            [](const RegionRef& a, const RegionRef& b) { return a->number < b->number; });
  if (regions.size() > most) regions.resize(most);
  std::vector<Listed> listed;
  for (const RegionRef& region : regions)
    listed.push_back({region->range, region->rights & kRemoteRights, region->device});
  return listed;
}

RegionRef RegionTable::open_window(const RegionRef& region, const Range& range) {
  const std::lock_guard lock(mutex_);
  release_left();
  MK_CHECK(region->open, "window: region must be open, got a closed one");
  MK_CHECK(region->rights & kRemoteWindows, "window: region must have access to windows");
  MK_CHECK(range.num_bytes > 0 && region->range.contains(range), "window: range must be inside ",
           describe(region->range), ", got ", describe(range));
  RegionRef& window = windows_[{range.address, range.num_bytes}];
  if (!window) window = std::make_shared<Region>(Region{range, kRemoteRead, region->device});
  ++window->num_openings;
  return window;
}

void RegionTable::close_window(const RegionRef& window) {
  std::unique_lock lock(mutex_);
  release_left();
  if (!window->open || --window->num_openings > 0) return;
  windows_.erase({window->range.address, window->range.num_bytes});
  end_uses(*window);
  unpinned_.wait(lock, [&] { return window->users.empty(); });
  if (!release_unused(*window)) in_use_.push_back(window);
}

// Windows whose readers had not noticed when they were closed.
void RegionTable::release_left() {
  in_use_.erase(std::remove_if(in_use_.begin(), in_use_.end(),
                               [](const RegionRef& region) { return release_unused(*region); }),
                in_use_.end());
}

bool RegionTable::remove(const RegionRef& region) {
  withdraw(region);
  return wait_until_unused(region, Deadline::after(kOffersInUseS));
}

void RegionTable::withdraw(const RegionRef& region) {
  const std::lock_guard lock(mutex_);
  if (!region->open) return;
  by_address_.erase(region->range.address);
  end_uses(*region);
  withdraw_windows(*region);
}

void RegionTable::end_uses(Region& region) {
  region.open = false;
  for (Interrupt* user : region.users) user->signal(kRegionClosed);
  for (const auto& [page, offer] : region.offers) page->withdraw(offer);
}

void RegionTable::withdraw_windows(Region& region) {
  auto at = windows_.lower_bound({region.range.address, 0});
  while (at != windows_.end() && region.range.contains(at->second->range)) {
    end_uses(*at->second);
    region.windows.push_back(at->second);
    at = windows_.erase(at);
  }
}

bool RegionTable::wait_until_unused(const RegionRef& region, const Deadline& deadline) {
  for (const RegionRef& window : region->windows) {  // they are added to until it is withdrawn
    if (!wait_until_unused(window, deadline)) return false;
  }
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

// Whether no offer is left. Under the mutex: a slot on the control page may be reused at once by
// another region, whose users must not be mistaken for this one's by another remover.
bool RegionTable::release_unused(Region& region) {
  const auto is_over = [](const auto& item) {
    const auto& [page, offer] = item;
    if (page->in_use(offer)) return false;
    page->release(offer);
    return true;
  };
  auto& offers = region.offers;
  offers.erase(std::remove_if(offers.begin(), offers.end(), is_over), offers.end());
  return offers.empty();
}

std::vector<RegionTable::Offered> RegionTable::offer(const std::shared_ptr<ControlPage>& page) {
  std::vector<Offered> offered;
  const std::lock_guard lock(mutex_);
  for_each([&](const RegionRef& region) {
    auto& offers = region->offers;
    auto known = std::find_if(offers.begin(), offers.end(),
                              [&](const auto& item) { return item.first == page; });
    if (known == offers.end()) {
      const Offer made = page->offer();
      if (made.generation == 0) return;  // regions without an offer use the connection
      known = offers.insert(offers.end(), {page, made});
    }
    const Rights rights = region->rights & (kLocalWrite | kRemoteRights);
    offered.push_back({region->range, rights, region->device, known->second});
  });
  return offered;
}

// Regions first: their memory stays mapped by initiators, whatever windows there are.
template <class Visit>
void RegionTable::for_each(const Visit& visit) const {
  for (const auto& [address, region] : by_address_) visit(region);
  for (const auto& [place, window] : windows_) visit(window);
}

void RegionTable::forget(const std::shared_ptr<ControlPage>& page) {
  const std::lock_guard lock(mutex_);
  for_each([&](const RegionRef& region) {
    auto& offers = region->offers;
    const auto is_over = [&](const auto& item) {
      if (item.first != page) return false;
      page->withdraw(item.second);
      return !page->in_use(item.second);
    };
    offers.erase(std::remove_if(offers.begin(), offers.end(), is_over), offers.end());
  });
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

std::vector<RegionRef> RegionTable::windows() const {
  std::vector<RegionRef> windows;
  const std::lock_guard lock(mutex_);
  for (const auto& [place, window] : windows_) windows.push_back(window);
  return windows;
}

std::vector<RegionRef> RegionTable::around(const std::vector<uint64_t>& addresses) const {
  std::map<uint64_t, RegionRef> found;
  const std::lock_guard lock(mutex_);
  for (const uint64_t address : addresses) {
    const RegionRef* const region = find({address, 1});
    if (!region || ((*region)->rights & kRemoteWindows && !find_window({address, 1}))) continue;
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

// Windows seldom overlap: usually it is the last one that begins before.
const RegionRef* RegionTable::find_window(const Range& range) const {
  auto at = windows_.upper_bound({range.address, UINT64_MAX});
  while (at != windows_.begin()) {
    if ((--at)->second->range.contains(range)) return &at->second;
  }
  return nullptr;
}

// The region, or a window on it that has more rights.
const RegionRef* RegionTable::find_usable(const Range& range, Rights needed) const {
  const RegionRef* const region = find(range);
  if (!region || !((*region)->rights & kRemoteWindows) || needed != kRemoteRead) return region;
  const RegionRef* const window = find_window(range);
  return window ? window : region;
}

std::vector<RegionRef> RegionTable::check(const Ranges& ranges, Rights needed, const char* side,
                                          uint64_t first_index) const {
  std::vector<RegionRef> found;
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < ranges.count; i += num_inside(ranges, i, found.back()->range)) {
    const Range range = ranges[i];
    const RegionRef* const region = find_usable(range, needed);
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
