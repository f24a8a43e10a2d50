// Resource: something of a NIC that lives on something else of it, as a queue pair on its
// completion queue. Closing one first closes what lives on it, the newest first.
//
//   auto device = make_resource<Device>("mlx5_0");
//   auto queue = make_resource<CompletionQueue>(device, 256);
//   device->close();   // destroys the queue, then closes the device
//
// Layer: rdma. Thread-safe: close() waits for calls that are using the handle.
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
  virtual ~Resource() = default;  // whose own destructor must call close()

  // Idempotent, and over when it returns, whoever began it. In a forked child it does nothing: the
  // handles belong to the parent process.
  void close() noexcept;
  bool is_closed() const;
  const std::string& what() const { return what_; }  // as in "queue pair 17 of mlx5_0"

  // Keeps the handle from being closed for as long as it lives.
  class Use {
   public:
    // Throws InvalidArgument if it is closed, or in a forked child.
    Use(const Resource& resource, const char* op);

   private:
    std::shared_lock<std::shared_mutex> lock_;
  };

 protected:
  // Gives the handle back: once, when nothing lives on it and nobody uses it.
  virtual void release() noexcept = 0;
  // Makes whoever uses the handle for long (a wait) leave; called before release.
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
  uint64_t id_ = 0;  // unique; greater than that of all older ones

  std::mutex close_mutex_;  // held for the length of a close
  mutable std::shared_mutex use_mutex_;
  bool closed_ = false;  // under use_mutex_
  // No new uses from here on: a lock that is always shared by someone would never be had alone.
  std::atomic<bool> leaving_{false};

  std::mutex children_mutex_;
  std::condition_variable childless_;
  bool closing_ = false;
  std::map<uint64_t, std::weak_ptr<Resource>> children_;
};

// The only way to make one: what cannot be made leaves nothing behind.
template <class T, class... Args>
std::shared_ptr<T> make_resource(Args&&... args) {
  auto resource = std::make_shared<T>(std::forward<Args>(args)...);
  resource->join_parents();
  return resource;
}

}  // namespace mk::rdma
