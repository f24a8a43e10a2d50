#include "transfer/file/gpu_bounce.h"

#include <optional>

#include "common/copy_bytes.h"
#include "common/fault_guard.h"
#include "transfer/base/error.h"

namespace mk::transfer {
namespace {

void expect(const std::optional<Fault>& fault) {
  if (fault) throw Inaccessible("local ", fault->describe());
}

}  // namespace

char* GpuBounce::take(int device) {
  if (!pinned_) {
    try {
      pinned_ = std::make_unique<PinnedMemory>(kNumChunks * kChunkBytes, device);
    } catch (const std::exception& error) {
      throw GpuFailure(error.what());
    }
    settle();
  }
  char* const chunk = free_.back();
  free_.pop_back();
  return chunk;
}

void GpuBounce::gather(const std::vector<iovec>& parts, const GpuRanges& gpus, char* chunk,
                       const Limit& limit) {
  std::vector<GpuCopy> copies;
  for_each_stretch(parts, gpus, [&](uint64_t address, uint64_t num_bytes, int device) {
    if (device < 0) {
      expect(guarded([&]() noexcept {
        copy_bytes(chunk, reinterpret_cast<const void*>(address), num_bytes);
      }));
    } else {
      copies.push_back({reinterpret_cast<uint64_t>(chunk), address, num_bytes, device});
    }
    chunk += num_bytes;
  });
  uint64_t num_bytes = 0;
  queue_.copy(copies, limit, num_bytes);
}

void GpuBounce::scatter(const char* chunk, const std::vector<iovec>& parts, const GpuRanges& gpus,
                        const Limit& limit) {
  std::vector<GpuCopy> copies;
  for_each_stretch(parts, gpus, [&](uint64_t address, uint64_t num_bytes, int device) {
    if (device < 0) {
      expect(guarded(
          [&]() noexcept { copy_bytes(reinterpret_cast<void*>(address), chunk, num_bytes); }));
    } else {
      copies.push_back({address, reinterpret_cast<uint64_t>(chunk), num_bytes, device});
    }
    chunk += num_bytes;
  });
  uint64_t num_bytes = 0;
  queue_.copy(copies, limit, num_bytes);
}

void GpuBounce::settle() noexcept {
  if (!pinned_) return;
  free_.clear();
  if (!queue_.drain()) {  // a GPU that hangs keeps the memory
    pinned_->leak();
    pinned_.reset();
    return;
  }
  for (size_t i = 0; i < kNumChunks; ++i) free_.push_back(pinned_->data() + i * kChunkBytes);
}

void GpuBounce::close() noexcept {
  settle();
  free_.clear();
  pinned_.reset();
  queue_.close();
}

}  // namespace mk::transfer
