// libibverbs, opened when first asked for. Its data-path calls (ibv_post_send, ibv_poll_cq, ...)
// are inline in verbs.h and go through the context, so they need no entry here.
#pragma once

#if __has_include(<infiniband/verbs.h>)
#define MK_HAVE_VERBS 1
#include <infiniband/verbs.h>

#include "common/dynlib.h"

namespace mk::rdma {

#define MK_VERBS_FUNCTIONS(X) X(ibv_get_device_list) X(ibv_free_device_list) X(ibv_get_device_name)
MK_DYNLIB(Verbs, "libibverbs.so.1", MK_VERBS_FUNCTIONS)

}  // namespace mk::rdma
#else
#define MK_HAVE_VERBS 0
#endif
