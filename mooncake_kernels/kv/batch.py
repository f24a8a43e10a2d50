"""copy_batch: copy a list of ranges by address. Public as ``mooncake_kernels.copy_batch``."""

from typing import Literal

import torch

from .. import _library
from .._arguments import as_bool
from ..errors import InvalidArgument, Unavailable
from ..reference import kv as reference
from .execute import check_max_sms

BatchEngine = Literal["auto", "host", "cuda", "copy_engine", "reference"]
NUMBERS = {"auto": 0, "host": 1, "cuda": 2, "copy_engine": 3, "reference": 4}  # csrc/ops/copy_batch
NAMES = {number: name for name, number in NUMBERS.items()}


def copy_batch(
    src_ptrs: torch.Tensor,
    dst_ptrs: torch.Tensor,
    sizes: torch.Tensor,
    is_src_access_order_any: bool = False,
    *,
    engine: BatchEngine = "auto",
    max_sms: int | None = None,
) -> None:
    """Copy ranges of bytes, of any length, between any addresses.

    Equivalent to::

        for src, dst, size in zip(src_ptrs, dst_ptrs, sizes):
            memcpy(dst, src, size)

    in any order and concurrently: no range may write what another one reads or writes. The check
    costs some nanoseconds per range, 20 to 60 if targets neither ascend nor descend. The arguments
    are those of vLLM's ``swap_blocks_batch``, for which this is a drop-in replacement.
    A range that continues the previous one on both sides is merged with it.

    Addresses may be in host memory, pageable or pinned, and in the memory of one GPU; the CUDA
    driver is asked which. Without a driver, or before this process has a CUDA context, all of them
    are host memory.

    If all addresses are in host memory, "auto" copies on the calling thread and torch's others,
    and the copy is done on return; it does not wait for work queued on a GPU. Otherwise the copy is
    queued on torch's current stream of the GPU that owns the addresses (the current device if none
    does) and may not have run on return: keep the memory until it has. The three tensors may be
    reused on return.

    Args:
        src_ptrs: ``[n]``, int64, on the CPU: addresses to read from.
        dst_ptrs: ``[n]``, likewise: addresses to write to.
        sizes: ``[n]``, likewise: bytes. 0 skips a range without checking its addresses.
        is_src_access_order_any: nothing queued or running writes to the sources, so they may be
            read before the stream's earlier work is done. Passed to the copy engine, which is
            faster with it on some machines; the other engines still read in stream order.
        engine: "host" (host memory); "cuda", a kernel that moves all ranges at once; "copy_engine",
            the GPU's own by ``cuMemcpyBatchAsync``, which uses no multiprocessors, takes 0.5 us of
            the caller's time per range, and can neither be captured into a CUDA graph nor run on
            the default stream; "reference". "auto" is cuda if any address is on a GPU, else host.
            For the two on a GPU, host memory must be pinned. A named engine never falls back.
        max_sms: let engine "cuda" use at most this many multiprocessors; None for all.

    Raises:
        InvalidArgument: an argument is not as above, an address is null, a size is negative or
            beyond 2**47, a range writes what it or another one reads or what another one writes, or
            it extends past the allocation in which the driver says it begins. Nothing has been
            copied then.
        Unavailable: the named engine is not available; or there is a CUDA context but the build has
            no CUDA and cannot tell where an address is: name engine "host" then.
        CudaError: CUDA refused the copy.
    """
    check_max_sms("copy_batch", max_sms)
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()  # the copied memory is hidden behind addresses
    if not isinstance(engine, str) or engine not in NUMBERS:
        raise InvalidArgument(f"copy_batch: engine must be one of {[*NUMBERS]}, got {engine!r}")
    if not _library.has_cuda:
        _require_host(engine)
    arrays = [
        _as_int64("src_ptrs", src_ptrs),
        _as_int64("dst_ptrs", dst_ptrs),
        _as_int64("sizes", sizes),
    ]
    is_any = as_bool("copy_batch", "is_src_access_order_any", is_src_access_order_any)
    number = NUMBERS[engine]
    ran = _library.call(_library.copy_batch, *arrays, is_any, number, int(max_sms or 0))
    if engine == "reference":
        reference.copy_batch(*arrays)
    if engine == "auto":
        _library.log_choice("copy_batch", NAMES[ran])


def _as_int64(name: str, values: torch.Tensor) -> torch.Tensor:
    if not isinstance(values, torch.Tensor):
        raise InvalidArgument(f"copy_batch: {name} must be a tensor, got {type(values).__name__}")
    is_list = values.dim() == 1 and values.layout is torch.strided
    if not is_list or values.dtype is not torch.int64 or values.device.type != "cpu":
        raise InvalidArgument(
            f"copy_batch: {name} must be 1-d int64 on the CPU, got {values.dtype} of shape "
            f"{tuple(values.shape)}, {values.layout} on {values.device}"
        )
    return values.contiguous()


def _require_host(engine: str) -> None:
    if engine in ("cuda", "copy_engine"):
        raise Unavailable(f"engine {engine}: _ops.so was built without nvcc")
    if engine == "auto" and torch.cuda.is_initialized():
        raise Unavailable(
            "engine auto: _ops.so was built without CUDA and cannot tell where an address is"
        )
