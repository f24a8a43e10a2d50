#include "rdma/memory_region.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <optional>

#include "common/parallel_for.h"
#include "rdma/error.h"
#include "rdma/gpu_memory.h"
#include "rdma/registration_error.h"

namespace mk::rdma {
namespace {

unsigned verbs_access(Access access) {
  unsigned flags = 0;
  // Verbs require local write access for remote writes.
  if (access & (kLocalWrite | kRemoteWrite)) flags |= IBV_ACCESS_LOCAL_WRITE;
  if (access & kRemoteRead) flags |= IBV_ACCESS_REMOTE_READ;
  if (access & kRemoteWrite) flags |= IBV_ACCESS_REMOTE_WRITE;
  return flags;
}

// Registers in one call; null with errno set on failure.
ibv_mr* register_host(ibv_pd* pd, Span span, Access access) {
  void* const start = reinterpret_cast<void*>(span.address);
  const unsigned flags = verbs_access(access);
  if ((access & kRelaxedOrdering) && VerbsIova2::reason().empty()) {
    return VerbsIova2::get().p_ibv_reg_mr_iova2(pd, start, span.num_bytes, span.address,
                                                flags | IBV_ACCESS_RELAXED_ORDERING);
  }
  return Verbs::get().p_ibv_reg_mr(pd, start, span.num_bytes, static_cast<int>(flags));
}

ibv_mr* register_dmabuf_mr(ibv_pd* pd, int fd, uint64_t offset, Span span, Access access) {
  const unsigned relaxed = access & kRelaxedOrdering ? IBV_ACCESS_RELAXED_ORDERING : 0;
  return VerbsDmabuf::get().p_ibv_reg_dmabuf_mr(pd, offset, span.num_bytes, span.address, fd,
                                                static_cast<int>(verbs_access(access) | relaxed));
}

// The maximum size of a piece: whole pages, so that pieces do not share one.
uint64_t piece_bytes(const DeviceInfo& info, const RegisterOptions& options) {
  const uint64_t page = sysconf(_SC_PAGESIZE);
  uint64_t limit = info.max_mr_bytes;
  if (options.max_piece_bytes > 0) limit = std::min(limit, options.max_piece_bytes);
  return std::max(limit / page * page, page);
}

// Cuts at multiples of `limit`, counted from the first byte's page.
template <class Register>
void register_pieces(Span span, uint64_t limit, std::vector<Piece>* pieces, Register register_one) {
  const uint64_t page = sysconf(_SC_PAGESIZE);
  const uint64_t room = limit - span.address % page;  // of the first piece
  for (uint64_t at = span.address; at < span.end();) {
    const uint64_t most = at == span.address ? room : limit;
    const Span piece{at, std::min(most, span.end() - at)};
    pieces->push_back({piece, MrHandle(register_one(piece))});
    at = piece.end();
  }
}

std::vector<Piece> register_host_pieces(const Device& device, Span span,
                                        const RegisterOptions& options) {
  std::vector<Piece> pieces;
  const bool writable = options.access & (kLocalWrite | kRemoteWrite);
  register_pieces(span, piece_bytes(device.info(), options), &pieces, [&](Span piece) {
    ibv_mr* mr = register_host(device.pd(), piece, options.access);
    if (mr) return mr;
    const int error = errno;
    throw SystemError(
        error, concat("ibv_reg_mr: ", explain_registration(error, device.info(), piece, writable)));
  });
  return pieces;
}

std::vector<Piece> register_dmabuf_pieces(const Device& device, Span span,
                                          const std::vector<DmabufExport>& exports,
                                          const RegisterOptions& options) {
  std::vector<Piece> pieces;
  for (const DmabufExport& dmabuf : exports) {
    // Exports consist of whole pages, which two mappings may share.
    const uint64_t after = pieces.empty() ? span.address : pieces.back().span.end();
    const uint64_t begin = std::max(after, dmabuf.span.address);
    const uint64_t end = std::min(span.end(), dmabuf.span.end());
    const Span part{begin, end - begin};
    register_pieces(part, piece_bytes(device.info(), options), &pieces, [&](Span piece) {
      ibv_mr* mr = register_dmabuf_mr(device.pd(), dmabuf.fd.get(),
                                      piece.address - dmabuf.span.address, piece, options.access);
      return check_handle(mr, "ibv_reg_dmabuf_mr", device.name());
    });
  }
  return pieces;
}

// Registers GPU memory in whichever way works; reports all reasons if none does.
class GpuRegistration {
 public:
  GpuRegistration(const GpuMemory& memory, Span span, const RegisterOptions& options)
      : memory_(memory), span_(span), options_(options), note_(synchronize_copies(memory)) {
    if (options.gpu_mapping == GpuMapping::kPeermem) {
      dmabufs_.reason = "not tried";
    } else if (!VerbsDmabuf::reason().empty()) {
      dmabufs_.reason = VerbsDmabuf::reason();
    } else {
      dmabufs_ = export_dmabufs(memory, span);
    }
  }

  RegionRef on(const std::shared_ptr<Device>& device) const {
    std::string dmabuf_reason = dmabufs_.reason;
    if (dmabuf_reason.empty()) {
      try {
        return region(device, Mapping::kDmabuf,
                      register_dmabuf_pieces(*device, span_, dmabufs_.exports, options_), note_);
      } catch (const SystemError& error) {
        dmabuf_reason = error.what();
      }
    }
    std::string peermem_reason = "not tried";
    if (options_.gpu_mapping != GpuMapping::kDmabuf) {
      try {
        const std::string separator = note_.empty() ? "" : "; ";
        return region(device, Mapping::kPeermem, register_host_pieces(*device, span_, options_),
                      concat(note_, separator, "not by dma-buf: ", dmabuf_reason));
      } catch (const SystemError& error) {
        peermem_reason = concat(error.code().message(), " (is nvidia_peermem loaded?)");
      }
    }
    throw Unavailable(concat("register: ", span_.num_bytes, " bytes of cuda:", memory_.device,
                             " cannot be registered on ", device->name(), ". By dma-buf: ",
                             dmabuf_reason, ". By nvidia_peermem: ", peermem_reason));
  }

 private:
  RegionRef region(const std::shared_ptr<Device>& device, Mapping mapping,
                   std::vector<Piece> pieces, std::string note) const {
    return make_resource<MemoryRegion>(device, span_, options_.access, mapping, std::move(pieces),
                                       std::move(note));
  }

  const GpuMemory& memory_;
  const Span span_;
  const RegisterOptions& options_;
  const std::string note_;
  DmabufExports dmabufs_;
};

// Registering less takes less time than starting a thread.
constexpr uint64_t kAtOnceBytes = 1 << 20;

// One region per device, large ones in parallel; throws the first error, if any.
template <class Register>
std::vector<RegionRef> on_all(const std::vector<std::shared_ptr<Device>>& devices,
                              uint64_t num_bytes, Register register_on) {
  const int64_t count = static_cast<int64_t>(devices.size());
  std::vector<RegionRef> regions(devices.size());
  std::vector<std::exception_ptr> errors(devices.size());
  const int num_threads = num_bytes < kAtOnceBytes ? 1 : static_cast<int>(count);
  parallel_for(count, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      try {
        const Resource::Use use(*devices[i], "register");
        regions[i] = register_on(devices[i]);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    }
  });
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);  // `regions` releases those that were made
  }
  return regions;
}

}  // namespace

const char* mapping_name(Mapping mapping) {
  static const char* const names[] = {"host", "dmabuf", "peermem"};
  return names[static_cast<int>(mapping)];
}

MemoryRegion::MemoryRegion(std::shared_ptr<Device> device, Span span, Access access,
                           Mapping mapping, std::vector<Piece> pieces, std::string note)
    : Resource(concat("region of ", span.num_bytes, " bytes on ", device->name()), {device}),
      device_(std::move(device)),
      span_(span),
      access_(access),
      mapping_(mapping),
      pieces_(std::move(pieces)),
      note_(std::move(note)) {}

MemoryRegion::~MemoryRegion() {
  close();
  // What a forked child holds belongs to its parent: to the kernel, both are the same file.
  for (Piece& piece : pieces_) piece.mr.release();
}

std::vector<RegionRef> register_memory(const std::vector<std::shared_ptr<Device>>& devices,
                                       Span span, const RegisterOptions& options) {
  MK_CHECK(span.num_bytes > 0, "register: buffer must hold at least one byte, got none");
  MK_CHECK(span.num_bytes <= UINT64_MAX - span.address,
           "register: buffer must end within the address space, got ", span.num_bytes, " bytes at ",
           span.address);
  MK_CHECK(!devices.empty(), "register: devices must name at least one, got none");
  const std::optional<GpuMemory> gpu = find_gpu_memory(span);
  if (!gpu) {
    MK_CHECK(options.gpu_mapping == GpuMapping::kAuto,
             "register: mapping must be \"auto\" for host memory, got ",
             options.gpu_mapping == GpuMapping::kDmabuf ? "\"dmabuf\"" : "\"peermem\"");
    return on_all(devices, span.num_bytes, [&](const std::shared_ptr<Device>& device) {
      return make_resource<MemoryRegion>(device, span, options.access, Mapping::kHost,
                                         register_host_pieces(*device, span, options));
    });
  }
  const GpuRegistration registration(*gpu, span, options);
  return on_all(devices, span.num_bytes,
                [&](const auto& device) { return registration.on(device); });
}

RegionRef register_dmabuf(const std::shared_ptr<Device>& device, int fd, uint64_t offset, Span span,
                          Access access) {
  const Resource::Use use(*device, "register_dmabuf");
  MK_CHECK(span.num_bytes > 0, "register_dmabuf: num_bytes must be positive, got 0");
  ibv_mr* mr = register_dmabuf_mr(device->pd(), fd, offset, span, access);
  std::vector<Piece> pieces;
  pieces.push_back({span, MrHandle(check_handle(mr, "ibv_reg_dmabuf_mr",
                                                concat(span.num_bytes, " bytes of the dma-buf ", fd,
                                                       " on ", device->name())))});
  return make_resource<MemoryRegion>(device, span, access, Mapping::kDmabuf, std::move(pieces));
}

}  // namespace mk::rdma
