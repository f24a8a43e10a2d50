// Resource: an object on a NIC that depends on another one, as a queue pair does on its completion
// queue. Closing one first closes its dependents, the newest first.
//
//   auto device = make_resource<Device>("mlx5_0");
//   auto queue = make_resource<CompletionQueue>(device, 256);
//   device->close();   // destroys the queue, then closes the device
//
// Layer: rdma. Thread-safe: close() waits for calls that use the handle.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "common/owner.h"

namespace mk::rdma {

class Resource : public std::enable_shared_from_this<Resource> {
 public:
  using Parents = std::vector<std::shared_ptr<Resource>>;

  Resource(std::string what, Parents parents)
      : what_(std::move(what)), parents_(std::move(parents)) {}
  Resource(const Resource&) = delete;
  virtual ~Resource() = default;  // the subclass's destructor must call close()

  // Idempotent. On return it is closed, whichever thread began that. In a forked child it does
  // nothing: the handles belong to the parent process.
  void close() noexcept;
  bool is_closed() const;
  const std::string& what() const { return what_; }  // such as "queue pair 17 of mlx5_0"

  // Keeps the handle from being closed while the Use lives.
  class Use {
   public:
    // Throws InvalidArgument if it is closed, or in a forked child.
    Use(const Resource& resource, const char* op);

   private:
    std::shared_lock<std::shared_mutex> lock_;
  };

 protected:
  // Releases the handle: called once, when it has neither dependents nor users.
  virtual void release() noexcept = 0;
  // Makes long uses of the handle (waits) return; called before release.
  virtual void interrupt() noexcept {}
  bool is_leaving() const { return leaving_; }
  void rename(std::string what) { what_ = std::move(what); }

 private:
  template <class T, class... Args>
  friend std::shared_ptr<T> make_resource(Args&&... args);

  void join_parents();
  void add_child(uint64_t id, std::weak_ptr<Resource> child);
  void forget_child(uint64_t id) noexcept;
  void close_children() noexcept;

  std::string what_;
  const Parents parents_;
  const Owner owner_;
  uint64_t id_ = 0;  // unique, and greater than any older one

  std::mutex close_mutex_;  // held during a close
  mutable std::shared_mutex use_mutex_;
  bool closed_ = false;  // guarded by use_mutex_
  // Admits no new uses: a lock that is always shared by someone could never be acquired
  // exclusively.
  std::atomic<bool> leaving_{false};

  std::mutex children_mutex_;
  std::condition_variable childless_;
  bool closing_ = false;
  std::map<uint64_t, std::weak_ptr<Resource>> children_;
};

// The only way to create one: if that fails, nothing is left behind.
template <class T, class... Args>
std::shared_ptr<T> make_resource(Args&&... args) {
  auto resource = std::make_shared<T>(std::forward<Args>(args)...);
  resource->join_parents();
  return resource;
}

}  // namespace mk::rdma
