// The part of NVIDIA's cuFile API that is used here, following its reference and header (1.0 and
// later). CUDA's compiler toolkits do not include that header.
//
// Layer: transfer.
#pragma once

#include <cuda.h>
#include <sys/types.h>

#include <cstddef>

#if __has_include(<cufile.h>)
#include <cufile.h>
#else
extern "C" {

typedef struct CUfileError {
  int err;  // 0: none; else above 5000
  CUresult cu_err;
} CUfileError_t;

typedef struct CUfileDescr_t {
  int type;
  union {
    int fd;
    void* handle;
  } handle;
  const void* fs_ops;
} CUfileDescr_t;

typedef void* CUfileHandle_t;

typedef struct CUfileDrvProps {
  struct {
    unsigned major_version;
    unsigned minor_version;
    size_t poll_thresh_size;
    size_t max_direct_io_size;
    unsigned dstatusflags;
    unsigned dcontrolflags;
  } nvfs;
  unsigned fflags;
  unsigned max_device_cache_size;
  unsigned per_buffer_cache_size;
  unsigned max_device_pinned_mem_size;
  unsigned max_batch_io_size;
  unsigned max_batch_io_timeout_msecs;
} CUfileDrvProps_t;

enum { CU_FILE_HANDLE_TYPE_OPAQUE_FD = 1, CU_FILE_P2P_SUPPORTED = 4 };

CUfileError_t cuFileDriverOpen(void);
CUfileError_t cuFileDriverGetProperties(CUfileDrvProps_t* props);
CUfileError_t cuFileHandleRegister(CUfileHandle_t* handle, CUfileDescr_t* description);
void cuFileHandleDeregister(CUfileHandle_t handle);
ssize_t cuFileRead(CUfileHandle_t handle, void* base, size_t size, off_t file_offset,
                   off_t base_offset);
ssize_t cuFileWrite(CUfileHandle_t handle, const void* base, size_t size, off_t file_offset,
                    off_t base_offset);

}  // extern "C"
#endif
