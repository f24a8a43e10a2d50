// Slices over a rail of the fake NICs: once as many as fit have been under way, no more memory is
// allocated for them. What the fake library itself allocates does not count.
#include <cstdlib>
#include <new>

#include "expect.h"
#include "rdma/fake/control.h"
#include "transfer/rdma/rail.h"

namespace {

thread_local bool is_counted = false;
thread_local int num_allocated = 0;

void* allocate(size_t size) {
  num_allocated += is_counted;
  return std::malloc(size);
}

}  // namespace

void* operator new(size_t size) { return allocate(size); }
void* operator new[](size_t size) { return allocate(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace {

using namespace mk;
using namespace mk::transfer;

// The library's calls, which allocate.
struct Uncounted {
  bool before = std::exchange(is_counted, false);
  ~Uncounted() { is_counted = before; }
};

decltype(ibv_context_ops::post_send) fake_post_send;
decltype(ibv_context_ops::poll_cq) fake_poll_cq;

int post_send(ibv_qp* pair, ibv_send_wr* work, ibv_send_wr** bad) {
  const Uncounted uncounted;
  return fake_post_send(pair, work, bad);
}

int poll_cq(ibv_cq* queue, int count, ibv_wc* entries) {
  const Uncounted uncounted;
  return fake_poll_cq(queue, count, entries);
}

rdma::RemoteRegion told(const rdma::MemoryRegion& region) {
  rdma::RemoteRegion remote{region.span(), region.access(), {}};
  for (const auto& piece : region.pieces()) remote.pieces.push_back({piece.span, piece.mr->rkey});
  return remote;
}

void test(bool reads) {
  constexpr size_t kSlices = 32, kParts = 20, kPart = 100;
  const Nics nics({{"fake0", 1, 10.0, {}}, {"fake1", 1, 10.0, {}}}, {}, true);
  std::vector<char> memory[2];
  NicMemoryRef regions[2];
  for (int i = 0; i < 2; ++i) {
    memory[i].resize(2 * kSlices * kParts * kPart, static_cast<char>(i));
    const Range range{reinterpret_cast<uint64_t>(memory[i].data()), memory[i].size()};
    regions[i] = nics.add(range, kLocalWrite | kRemoteRead | kRemoteWrite, -1);
  }
  PathCounters counters{};
  Rail near(nics[0], 0, 1, counters), far(nics[1], 1, 0, counters);
  const rdma::Endpoint ours = near.open(), theirs = far.open();
  near.connect(theirs, 1, 10.0);
  far.connect(ours, 0, 10.0);
  const auto remote = std::make_shared<const rdma::RemoteRegion>(told(*regions[1]->regions[1]));
  ibv_context_ops& calls = nics[0].device->context()->ops;
  fake_post_send = std::exchange(calls.post_send, &post_send);
  fake_poll_cq = std::exchange(calls.poll_cq, &poll_cq);

  Slices ready, done, spare;
  size_t num_done = 0;
  const auto round = [&] {
    for (size_t i = 0; i < kSlices; ++i) {
      Slice& slice = append(ready, spare);
      slice.reads = reads;
      slice.local = regions[0];
      slice.num_bytes = kParts * kPart;
      for (size_t k = 0; k < kParts; ++k) {
        const uint64_t offset = 2 * (i * kParts + k) * kPart;  // none continues another
        slice.segments.push_back({reinterpret_cast<uint64_t>(memory[0].data()) + offset,
                                  reinterpret_cast<uint64_t>(memory[1].data()) + offset, kPart});
      }
    }
    while (!ready.empty()) near.submit(ready, remote);
    for (const size_t end = num_done + kSlices; num_done < end;) {
      near.collect(done);
      num_done += done.size();
      give_back(done, spare);
    }
  };
  for (int i = 0; i < 3; ++i) round();
  is_counted = true;
  for (int i = 0; i < 20; ++i) round();
  is_counted = false;
  EXPECT(num_allocated == 0);
  std::fprintf(stderr, "%d allocations for %zu slices\n", num_allocated, 20 * kSlices);
  const auto& source = memory[reads ? 1 : 0];
  const auto& target = memory[reads ? 0 : 1];
  EXPECT(target[0] == source[0] && target[2 * kPart] == source[2 * kPart]);
  EXPECT(target[kPart] != source[0]);
  near.close();
  far.close();
  for (const auto& region : regions) Nics::remove(*region);
}

}  // namespace

int main() {
  fake_reset(2);
  test(false);
  test(true);
  return failures() ? 1 : 0;
}
