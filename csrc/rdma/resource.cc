#include "rdma/resource.h"

#include "common/check.h"

namespace mk::rdma {

Resource::Use::Use(const Resource& resource, const char* op) {
  resource.owner_.check(op, resource.what_.c_str());
  if (!resource.leaving_) lock_ = std::shared_lock(resource.use_mutex_);
  MK_CHECK(lock_ && !resource.closed_, op, ": ", resource.what_, " must be open, but is closed");
}

bool Resource::is_closed() const {
  const std::shared_lock lock(use_mutex_);
  return closed_;
}

void Resource::close() noexcept {
  if (owner_.forked()) return;
  const std::lock_guard closing(close_mutex_);
  {
    const std::lock_guard lock(children_mutex_);
    closing_ = true;
  }
  close_children();
  if (is_closed()) return;
  leaving_ = true;
  interrupt();
  {
    const std::unique_lock lock(use_mutex_);
    closed_ = true;
    release();
  }
  for (const auto& parent : parents_) parent->forget_child(id_);
}

void Resource::close_children() noexcept {
  std::unique_lock lock(children_mutex_);
  while (!children_.empty()) {
    const auto newest = std::prev(children_.end());
    const uint64_t id = newest->first;
    if (auto child = newest->second.lock()) {
      lock.unlock();
      child->close();
      child.reset();  // this may be its last owner, and its destructor takes the lock
      lock.lock();
    } else {  // its last owner is closing it now
      childless_.wait(lock, [&] { return children_.count(id) == 0; });
    }
  }
}

void Resource::join_parents() {
  static std::atomic<uint64_t> last_id{0};
  id_ = ++last_id;
  for (const auto& parent : parents_) parent->add_child(id_, weak_from_this());
}

void Resource::add_child(uint64_t id, std::weak_ptr<Resource> child) {
  const std::lock_guard lock(children_mutex_);
  MK_CHECK(!closing_, what_, " must be open, but is closed");
  children_[id] = std::move(child);
}

void Resource::forget_child(uint64_t id) noexcept {
  const std::lock_guard lock(children_mutex_);
  children_.erase(id);
  childless_.notify_all();
}

}  // namespace mk::rdma
