// Where addresses are and how ranges are joined, and the copy engine, with a driver that is made
// up. Without an argument all is host memory; "old": a driver of CUDA 12.4.
#include "kv/copy_list.h"

#include <cuda.h>
#include <dlfcn.h>

#include <string>

#include "common/check.h"
#include "expect.h"
#include "kv/copy_engine.h"
#include "kv/fake_cuda_driver.h"

namespace {

using namespace mk;
using namespace mk::kv;

// Two registrations of pinned memory side by side, a GPU's memory, and one of another GPU.
constexpr int64_t kPinned = 1 << 20, kNext = kPinned + 4096, kDevice = 1 << 24, kOther = 1 << 25,
                  kPageable = 1 << 26, kShifted = 1 << 27;
const std::vector<FakeAllocation> kAllocations = {
    {kPinned, kNext, CU_MEMORYTYPE_HOST, 0, 0},
    {kNext, kNext + 4096, CU_MEMORYTYPE_HOST, 0, 0},
    {kDevice, kDevice + 65536, CU_MEMORYTYPE_DEVICE, 0, 0},
    {kOther, kOther + 65536, CU_MEMORYTYPE_DEVICE, 1, 0},
    {kShifted, kShifted + 4096, CU_MEMORYTYPE_HOST, 0, 1 << 30},
};

struct Entry {
  int64_t src, dst, num_bytes;
};

CopyList read(const std::vector<Entry>& entries, bool translated = false) {
  std::vector<int64_t> src, dst, sizes;
  for (const Entry& e : entries) {
    src.push_back(e.src), dst.push_back(e.dst), sizes.push_back(e.num_bytes);
  }
  MemoryMap map;
  CopyList list = read_copy_list({src.data(), dst.data(), sizes.data()}, src.size(), map);
  if (translated) translate_for_device(list.ranges, map);
  return list;
}

std::string error_of(const std::vector<Entry>& entries) {
  try {
    read(entries);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

bool says(const std::string& message, const char* part) {
  return message.find(part) != std::string::npos;
}

void check_without_context() {
  const CopyList list = read({{kDevice, kOther, 64}, {kDevice + 64, kOther + 64, 64}});
  EXPECT(list.ranges.size() == 1 && !list.device.exists());
  EXPECT(list.pageable.exists() && list.pageable.index == 0 && list.pageable.is_src);
}

void check_kinds(FakeDriver& driver) {
  driver.num_questions = 0;
  CopyList list = read({{1, 2, 0}, {kPinned, kDevice, 64}, {kPinned + 128, kDevice + 64, 64}});
  EXPECT(list.ranges.size() == 2 && list.num_bytes == 128 && !list.pageable.exists());
  EXPECT(list.device.index == 1 && !list.device.is_src && list.device_index == 0);
  EXPECT(driver.num_questions == 2);  // one for each allocation
  EXPECT(driver.num_retained == 0);

  list = read(
      {{kPinned, kDevice, 64}, {kPageable, kDevice + 64, 64}, {kPageable + 64, kDevice + 128, 64}});
  EXPECT(list.pageable.index == 1 && list.pageable.is_src);
  EXPECT(list.ranges.size() == 2);  // pageable neighbours are joined as well
  EXPECT(driver.num_questions == 2 + 4);

  list = read({{kShifted + 8, kDevice, 64}}, true);
  EXPECT(reinterpret_cast<int64_t>(list.ranges[0].src) == kShifted + 8 + (1 << 30));
  EXPECT(reinterpret_cast<int64_t>(list.ranges[0].dst) == kDevice);
}

void check_pinned() {
  MemoryMap map;
  const auto offset = [&map](int64_t address, uint64_t num_bytes) {
    return device_offset_of(map, address, num_bytes);
  };
  EXPECT(offset(kPinned, 8192) == uint64_t{0});  // two registrations side by side
  EXPECT(!offset(kPinned, 8193) && !offset(kPinned - 1, 2));
  EXPECT(offset(kShifted + 8, 4088) == uint64_t{1} << 30 && !offset(kShifted + 8, 4089));
  EXPECT(!offset(kDevice, 16) && !offset(kPageable, 1));
}

void check_allocations() {
  // Joined up to the end of a registration, and cut there.
  CopyList list = read({{kPinned, kDevice, 2048},
                        {kPinned + 2048, kDevice + 2048, 4096},
                        {kPinned + 6144, kDevice + 6144, 64}});
  EXPECT(list.ranges.size() == 2);
  EXPECT(list.ranges[0].num_bytes == 4096 && list.ranges[1].num_bytes == 2048 + 64);
  EXPECT(reinterpret_cast<int64_t>(list.ranges[1].src) == kNext);
  EXPECT(says(error_of({{kPinned, kDevice, 64}, {kDevice, kNext + 4000, 97}}),
              "dst_ptrs[1] must have sizes[1] = 97 bytes in its allocation, got 0x101fa0, whose "
              "allocation ends at 0x102000"));
  EXPECT(says(error_of({{kDevice + 65530, kPinned, 7}}), "src_ptrs[0] must have sizes[0] = 7"));
  EXPECT(says(error_of({{kDevice, kPinned, 8}, {kPinned, kOther, 8}}),
              "dst_ptrs[1] must be on cuda:0 as src_ptrs[0], got cuda:1"));
}

void check_copy_engine(FakeDriver& driver) {
  std::vector<char> src(300), dst(300, 7);
  for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<char>(i);
  const std::vector<CopyRange> ranges = {{&src[1], &dst[9], 100}, {&src[200], &dst[200], 31}};
  int stream = 0;
  EXPECT(copy_engine_missing().empty());
  copy_by_engine(ranges.data(), 2, true, &stream);
  EXPECT(driver.sizes == (std::vector<uint64_t>{100, 31}) && driver.stream == &stream);
  EXPECT(driver.order == CU_MEMCPY_SRC_ACCESS_ORDER_ANY);
  EXPECT(driver.flags == CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
  EXPECT(dst[8] == 7 && dst[9] == src[1] && dst[108] == src[100] && dst[109] == 7);
  EXPECT(dst[230] == src[230] && dst[231] == 7);
  copy_by_engine(ranges.data(), 2, false, &stream);
  EXPECT(driver.order == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
  // A thread that has not called the runtime yet has no context.
  void* const current = driver.current;
  for (void* before : {static_cast<void*>(nullptr), static_cast<void*>(&stream)}) {
    driver.current = before;
    copy_by_engine(ranges.data(), 2, false, &stream);
    EXPECT(driver.context == (before ? before : &driver));  // the stream's, or what there was
    EXPECT(driver.current == before);
  }
  driver.current = current;
  copy_by_engine(nullptr, 0, false, &stream);
  for (void* legacy : {static_cast<void*>(nullptr), reinterpret_cast<void*>(1)}) {
    std::string message;
    try {
      copy_by_engine(ranges.data(), 2, false, legacy);
    } catch (const InvalidArgument& error) {
      message = error.what();
    }
    EXPECT(says(message, "the current stream must not be the default one"));
  }
  driver.fails = true;
  std::string message;
  try {
    copy_by_engine(ranges.data(), 2, false, &stream);
  } catch (const CudaError& error) {
    message = error.what();
  }
  EXPECT(says(message, "CUDA: cuMemcpyBatchAsync: CUDA_ERROR_INVALID_VALUE (31 bytes from 0x"));
}

}  // namespace

int main(int num_arguments, char**) {
  check_without_context();  // the driver is not loaded
  void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  auto* const driver = library ? static_cast<FakeDriver*>(dlsym(library, "fake_driver")) : nullptr;
  EXPECT(driver);
  if (!driver) return failures();
  driver->allocations = kAllocations;
  check_without_context();  // no one has called cuInit
  driver->is_initialized = true;
  check_without_context();  // no one has made a context
  if (num_arguments > 1) {
    driver->version = 12040;
    EXPECT(says(copy_engine_missing(), "needs a driver of CUDA 12.8, this one is of 12.4"));
    return failures();
  }
  driver->active_device = 1;
  check_kinds(*driver);
  EXPECT(!driver->current);  // as it was
  driver->active_device = -1;
  driver->current = driver;
  check_allocations();
  check_pinned();
  EXPECT(driver->current == driver);
  check_copy_engine(*driver);
  return failures();
}
