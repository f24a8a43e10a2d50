// libibverbs, loaded on first use. Its data-path calls (ibv_post_send, ibv_poll_cq, ...) are inline
// in verbs.h and go through the context, so they need no entry here. The header is always that of
// third_party/rdma-core.
//
// Layer: rdma.
#pragma once

#include <infiniband/verbs.h>

#include "common/dynlib.h"

namespace mk::rdma {

constexpr const char* kVerbsName = "libibverbs.so.1";

// clang-format off
#define MK_VERBS_FUNCTIONS(X)                                                                  \
  X(ibv_get_device_list) X(ibv_free_device_list) X(ibv_get_device_name) X(ibv_get_device_guid) \
  X(ibv_open_device) X(ibv_close_device) X(ibv_query_device) X(ibv_query_port)                 \
  X(ibv_query_gid) X(ibv_alloc_pd) X(ibv_dealloc_pd) X(ibv_reg_mr) X(ibv_dereg_mr)             \
  X(ibv_create_comp_channel) X(ibv_destroy_comp_channel) X(ibv_create_cq) X(ibv_destroy_cq)    \
  X(ibv_get_cq_event) X(ibv_ack_cq_events) X(ibv_create_qp) X(ibv_modify_qp)                   \
  X(ibv_destroy_qp) X(ibv_get_async_event) X(ibv_ack_async_event) X(ibv_wc_status_str)
// clang-format on
MK_DYNLIB(Verbs, kVerbsName, MK_VERBS_FUNCTIONS)

// Functions that some libraries lack. Before a fork() (see device.cc):
#define MK_VERBS_FORK_FUNCTIONS(X) X(ibv_fork_init)
MK_DYNLIB(VerbsFork, kVerbsName, MK_VERBS_FORK_FUNCTIONS)
// Whether that is needed (rdma-core 35):
#define MK_VERBS_FORK_STATUS_FUNCTIONS(X) X(ibv_is_fork_initialized)
MK_DYNLIB(VerbsForkStatus, kVerbsName, MK_VERBS_FORK_STATUS_FUNCTIONS)
// Relaxed ordering (rdma-core 28):
#define MK_VERBS_IOVA2_FUNCTIONS(X) X(ibv_reg_mr_iova2)
MK_DYNLIB(VerbsIova2, kVerbsName, MK_VERBS_IOVA2_FUNCTIONS)
// The type of a GID (rdma-core 32):
#define MK_VERBS_GID_FUNCTIONS(X) X(_ibv_query_gid_ex)
MK_DYNLIB(VerbsGid, kVerbsName, MK_VERBS_GID_FUNCTIONS)
// Regions on a dma-buf (rdma-core 34):
#define MK_VERBS_DMABUF_FUNCTIONS(X) X(ibv_reg_dmabuf_mr)
MK_DYNLIB(VerbsDmabuf, kVerbsName, MK_VERBS_DMABUF_FUNCTIONS)

}  // namespace mk::rdma
