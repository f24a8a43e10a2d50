// copy_batch_kernel on the CPU, beside the host loop of the same list: every alignment and length.
#include <array>
#include <functional>

#include "emulator/cuda_on_cpu.h"
#include "expect.h"
#include "kv/copy_batch_kernel.cuh"

namespace {

using namespace mk::kv;

struct Memory {
  std::vector<char> src, dst, want;

  explicit Memory(size_t num_bytes) : src(num_bytes), dst(num_bytes, 0x77), want(dst) {
    for (size_t i = 0; i < num_bytes; ++i) src[i] = static_cast<char>(i * 2654435761u >> 13);
  }
  // The same list, to `out`.
  std::vector<CopyRange> at(const std::vector<std::array<int64_t, 3>>& list,
                            std::vector<char>& out) {
    std::vector<CopyRange> ranges;
    for (const auto& [from, to, num_bytes] : list) {
      ranges.push_back({src.data() + from, out.data() + to, num_bytes});
    }
    return ranges;
  }
};

void check(const std::vector<std::array<int64_t, 3>>& list, size_t num_bytes, emu::Launch launch) {
  Memory memory(num_bytes);
  const auto on_host = memory.at(list, memory.want);
  std::vector<int64_t> ends;
  for (const CopyRange& r : on_host) ends.push_back((ends.empty() ? 0 : ends.back()) + r.num_bytes);
  const int64_t n = static_cast<int64_t>(list.size()), total = n ? ends.back() : 0;
  // As two threads would, each with a part of the bytes.
  copy_batch_host(on_host.data(), ends.data(), n, 0, total / 3);
  copy_batch_host(on_host.data(), ends.data(), n, total / 3, total);
  const auto on_device = memory.at(list, memory.dst);
  static CopyBatchParams params;
  fill_params(params, on_device.data(), n);
  emu::run(copy_batch_kernel, launch, std::cref(params));
  EXPECT(memory.dst == memory.want);
}

}  // namespace

int main() {
  const std::vector<int64_t> sizes = {1,    3,    15,   16,   17,   64,   100,  656,
                                      2048, 4095, 4096, 4097, 4100, 8192, 20000};
  for (const int64_t shift : {0, 1, 4, 8}) {
    for (const int64_t both : {0, 4, 5}) {  // sizes in a row, src shifted against dst
      std::vector<std::array<int64_t, 3>> list;
      int64_t at = both;
      for (const int64_t size : sizes) {
        list.push_back({at + shift, at, size});
        at += (size + 31) / 16 * 16;
      }
      check(list, at + 64, {3, kBatchThreads, static_cast<unsigned>(shift)});
    }
  }
  check({{0, 16, 1 << 18}}, (1 << 18) + 32, {2, kBatchMaxThreads});  // as with max_sms
  std::vector<std::array<int64_t, 3>> full;
  for (int64_t i = 0; i < kMaxRanges; ++i) full.push_back({(i * 7 % kMaxRanges) * 32, i * 32, 24});
  check(full, kMaxRanges * 32, {2, kBatchThreads});
  check({}, 16, {1, kBatchThreads});
  return failures();
}
