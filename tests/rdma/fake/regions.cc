// Protection domains and memory regions.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "world.h"

namespace fake {
namespace {

constexpr unsigned kKnownAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ |
                                  IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

// Whether this process has mapped all of it, and may write to it if asked.
bool is_mapped(uint64_t begin, uint64_t end, bool writable) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; begin < end && std::getline(maps, line);) {
    std::istringstream words(line);
    uint64_t from = 0, to = 0;
    char dash = 0;
    std::string rights;
    words >> std::hex >> from >> dash >> to >> rights;
    if (to <= begin) continue;
    if (from > begin || rights[0] != 'r' || (writable && rights[1] != 'w')) return false;
    begin = to;
  }
  return begin >= end;
}

// The made-up driver's, if it is loaded.
template <class Function>
Function* of_driver(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}
bool is_gpu_memory(uint64_t address) {
  const auto find = of_driver<int(uint64_t)>("fake_cuda_is_memory");
  return find && find(address);
}
[[maybe_unused]] uint64_t find_dmabuf(int fd, uint64_t* num_bytes) {
  const auto find = of_driver<uint64_t(int, uint64_t*)>("fake_cuda_find_dmabuf");
  return find ? find(fd, num_bytes) : 0;
}

// Returns the errno.
int check_region(const ibv_pd* pd, uint64_t num_bytes, unsigned access) {
  World& w = world();
  const Model& model = model_of(pd->context);
  if (num_bytes == 0 || num_bytes > model.attr.max_mr_size) return EINVAL;
  const bool remote_write = access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC);
  if (remote_write && !(access & IBV_ACCESS_LOCAL_WRITE)) return EINVAL;
  const auto num_mrs = std::count_if(
      w.mrs.begin(), w.mrs.end(), [&](const Mr* mr) { return &model_of(mr->context) == &model; });
  if (num_mrs >= model.attr.max_mr) return ENOMEM;
  const auto limit = w.options.find("max_pinned_bytes");
  const bool full =
      limit != w.options.end() && w.pinned_bytes + num_bytes > static_cast<uint64_t>(limit->second);
  return full ? ENOMEM : 0;
}

ibv_mr* make_region(ibv_pd* pd, uint64_t memory, uint64_t num_bytes, uint64_t iova,
                    unsigned access) {
  auto* mr = new Mr{};
  mr->context = pd->context;
  mr->pd = pd;
  mr->addr = reinterpret_cast<void*>(iova);
  mr->length = num_bytes;
  Model& model = model_of(pd->context);
  mr->lkey = model.next_key += 0x101;
  mr->rkey = mr->lkey ^ 0x55;
  mr->iova = iova;
  mr->memory = reinterpret_cast<char*>(memory);
  mr->access = access;
  world().live[mr] = "region";
  world().mrs.push_back(mr);
  world().pinned_bytes += num_bytes;
  return mr;
}

ibv_mr* register_memory(const char* verb, ibv_pd* pd, void* start, size_t num_bytes, uint64_t iova,
                        unsigned access, unsigned known) {
  const auto address = reinterpret_cast<uint64_t>(start);
  const std::string arguments =
      concat("address=", address, " length=", num_bytes, " iova=", iova, " access=", access);
  if (const int error = enter(verb, model_of(pd->context), arguments)) {
    return refuse<ibv_mr>(error);
  }
  const Lock lock(world().mutex);
  if (!is_live(pd, "protection domain", verb)) return refuse<ibv_mr>(EINVAL);
  if (access & ~known) return refuse<ibv_mr>(EINVAL);
  if (const int error = check_region(pd, num_bytes, access)) return refuse<ibv_mr>(error);
  if (is_gpu_memory(address) || is_gpu_memory(address + num_bytes - 1)) {
    if (!world().options["peermem"]) return refuse<ibv_mr>(EFAULT);
  } else if (!is_mapped(address, address + num_bytes, access & IBV_ACCESS_LOCAL_WRITE)) {
    return refuse<ibv_mr>(EFAULT);
  }
  return make_region(pd, address, num_bytes, iova, access);
}

}  // namespace
}  // namespace fake

using namespace fake;

extern "C" {

ibv_pd* ibv_alloc_pd(ibv_context* context) {
  if (const int error = enter("ibv_alloc_pd", model_of(context))) return refuse<ibv_pd>(error);
  const Lock lock(world().mutex);
  auto* pd = new ibv_pd{context, 0};
  world().live[pd] = "protection domain";
  return pd;
}

int ibv_dealloc_pd(ibv_pd* pd) {
  if (const int error = enter("ibv_dealloc_pd", model_of(pd->context))) return error;
  const Lock lock(world().mutex);
  if (!is_live(pd, "protection domain", "ibv_dealloc_pd")) return EINVAL;
  const auto is_on = [&](const auto* handle) { return handle->pd == pd; };
  const auto& [mrs, qps] = std::tie(world().mrs, world().qps);
  if (std::any_of(mrs.begin(), mrs.end(), is_on) || std::any_of(qps.begin(), qps.end(), is_on)) {
    protest("ibv_dealloc_pd: regions or queue pairs are alive");
    return EBUSY;
  }
  world().live.erase(pd);
  delete pd;
  return 0;
}

ibv_mr* ibv_reg_mr(ibv_pd* pd, void* start, size_t num_bytes, int access) {
  const auto iova = reinterpret_cast<uint64_t>(start);
  return register_memory("ibv_reg_mr", pd, start, num_bytes, iova, static_cast<unsigned>(access),
                         kKnownAccess);
}

#ifndef FAKE_OLD
ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* start, size_t num_bytes, uint64_t iova,
                         unsigned access) {
  return register_memory("ibv_reg_mr_iova2", pd, start, num_bytes, iova, access,
                         kKnownAccess | IBV_ACCESS_OPTIONAL_RANGE);
}

ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, uint64_t offset, size_t num_bytes, uint64_t iova, int fd,
                          int access) {
  const std::string arguments = concat("offset=", offset, " length=", num_bytes, " iova=", iova,
                                       " fd=", fd, " access=", access);
  if (const int error = enter("ibv_reg_dmabuf_mr", model_of(pd->context), arguments)) {
    return refuse<ibv_mr>(error);
  }
  const Lock lock(world().mutex);
  if (!is_live(pd, "protection domain", "ibv_reg_dmabuf_mr")) return refuse<ibv_mr>(EINVAL);
  uint64_t exported = 0;
  const uint64_t memory = find_dmabuf(fd, &exported);
  if (!memory) return refuse<ibv_mr>(EBADF);
  const uint64_t page = sysconf(_SC_PAGESIZE);
  if ((offset ^ iova) % page != 0 || offset > exported || num_bytes > exported - offset) {
    return refuse<ibv_mr>(EINVAL);
  }
  const auto flags = static_cast<unsigned>(access);
  if (flags & ~(kKnownAccess | IBV_ACCESS_RELAXED_ORDERING)) return refuse<ibv_mr>(EINVAL);
  if (const int error = check_region(pd, num_bytes, flags)) return refuse<ibv_mr>(error);
  return make_region(pd, memory + offset, num_bytes, iova, flags);
}
#endif

int ibv_dereg_mr(ibv_mr* mr) {
  if (const int error = enter("ibv_dereg_mr", model_of(mr->context))) return error;
  const Lock lock(world().mutex);
  if (!is_live(mr, "region", "ibv_dereg_mr")) return EINVAL;
  auto& mrs = world().mrs;
  mrs.erase(std::find(mrs.begin(), mrs.end(), mr));
  world().pinned_bytes -= mr->length;
  world().live.erase(mr);
  delete static_cast<Mr*>(mr);
  return 0;
}

}  // extern "C"
