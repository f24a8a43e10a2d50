#include "transfer/gpu/gpu_queue.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <thread>

#include "transfer/base/error.h"

namespace mk::transfer {
namespace {

constexpr int kNumEagerLooks = 64;  // a copy of a few KiB is over before a thread could sleep
constexpr std::chrono::microseconds kLookEvery{20};
constexpr double kDrainS = 5;
constexpr uint64_t kStepBytes = 32ull << 20;  // a millisecond of PCIe
constexpr size_t kMaxStepCopies = 4096;
constexpr size_t kNumSteps = 2;  // in flight at once: a GPU never idles between them

}  // namespace

GpuStream& GpuQueue::stream(int device) {
  return streams_.try_emplace(device, device).first->second;
}

GpuQueue::Mark GpuQueue::begin(const std::vector<GpuCopy>& copies) {
  std::map<int, std::vector<GpuCopy>> by_device;
  for (const GpuCopy& copy : copies) by_device[copy.device].push_back(copy);
  Mark mark;
  try {
    for (const auto& [device, part] : by_device) {
      mark.emplace_back(device, stream(device).copy(part));
    }
  } catch (const Unavailable& error) {
    throw GpuFailure(error.what());
  } catch (const CudaError& error) {
    throw GpuFailure(error.what());
  }
  return mark;
}

bool GpuQueue::is_over(const Mark& mark) {
  try {
    return std::all_of(mark.begin(), mark.end(), [&](const auto& item) {
      return streams_.at(item.first).is_over(item.second);
    });
  } catch (const CudaError& error) {
    throw GpuFailure(error.what());
  }
}

void GpuQueue::wait(const Mark& mark, const Limit& limit) {
  for (int look = 0; !is_over(mark); ++look) {
    limit.check();
    if (look >= kNumEagerLooks) std::this_thread::sleep_for(kLookEvery);
  }
}

void GpuQueue::copy(const std::vector<GpuCopy>& copies, const Limit& limit,
                    uint64_t& num_bytes_done) {
  std::deque<std::pair<Mark, uint64_t>> under_way;
  std::vector<GpuCopy> step;
  uint64_t step_bytes = 0;
  const auto settle = [&](size_t most) {
    while (under_way.size() > most) {
      wait(under_way.front().first, limit);
      num_bytes_done += under_way.front().second;
      under_way.pop_front();
    }
  };
  const auto flush = [&] {
    if (step.empty()) return;
    limit.check();
    settle(kNumSteps - 1);
    under_way.emplace_back(begin(step), step_bytes);
    step.clear();
    step_bytes = 0;
  };
  try {
    for (GpuCopy copy : copies) {
      while (copy.num_bytes > 0) {
        const uint64_t now = std::min(copy.num_bytes, kStepBytes - step_bytes);
        step.push_back({copy.dst, copy.src, now, copy.device, copy.other});
        copy = {copy.dst + now, copy.src + now, copy.num_bytes - now, copy.device, copy.other};
        step_bytes += now;
        if (step_bytes == kStepBytes || step.size() == kMaxStepCopies) flush();
      }
    }
    flush();
    settle(0);
  } catch (...) {
    drain();
    throw;
  }
}

bool GpuQueue::drain() noexcept {
  const Deadline deadline = Deadline::after(kDrainS);
  try {
    for (auto& [device, stream] : streams_) {
      while (!stream.is_over(stream.last())) {
        if (deadline.passed()) throw GpuFailure("a GPU hangs");
        std::this_thread::sleep_for(kLookEvery);
      }
    }
    return true;
  } catch (const std::exception&) {
    streams_.clear();  // new ones are made for the next copies
    return false;
  }
}

void GpuQueue::close() noexcept {
  drain();
  streams_.clear();
}

}  // namespace mk::transfer
