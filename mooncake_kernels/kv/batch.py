"""copy_batch: a list of ranges by their addresses. Public as ``mooncake_kernels.copy_batch``."""

from typing import Literal

import torch

from .. import _library
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
    """Copy ranges of bytes, each of any length, from anywhere to anywhere.

    Equivalent to::

        for src, dst, size in zip(src_ptrs, dst_ptrs, sizes):
            memcpy(dst, src, size)

    in any order and at once: no range may write what another one reads or writes. To tell costs
    some nanoseconds a range, and 20 to 60 where targets neither ascend nor descend. The arguments
    are those of vLLM's ``swap_blocks_batch``, in whose place it can be put.
    A range that goes on where the one before it ended, on both sides, is joined with it.

    Addresses may be in host memory, pageable or pinned, and in the memory of one GPU, which is
    asked of the CUDA driver. Without one, or as long as this process has no CUDA context, all of
    it is host memory.

    If all addresses are in host memory, "auto" copies on the calling thread and torch's others,
    and the copy is done on return; work queued on a GPU is not waited for. Else it is queued on
    torch's current stream of the GPU that the addresses name (of the current device if they name
    none) and may not have run on return: the memory must stay until it has. The three tensors are
    done with on return.

    Args:
        src_ptrs: ``[n]``, int64, on the CPU: addresses to read from.
        dst_ptrs: ``[n]``, likewise: addresses to write to.
        sizes: ``[n]``, likewise: bytes. 0 skips a range, whose addresses are not looked at.
        is_src_access_order_any: the sources are written to by nothing that is queued or running,
            so that they may be read before the stream's earlier work is done. Handed to the copy
            engine, which is faster so on some machines; the other engines read in the stream's
            order all the same.
        engine: "host" (host memory); "cuda", a kernel that moves all ranges at once; "copy_engine",
            the GPU's own by ``cuMemcpyBatchAsync``, which leaves the multiprocessors alone, takes
            0.5 us of the caller's time a range, and can neither be captured into a CUDA graph nor
            run on the default stream; "reference". "auto" is cuda if any address is on a GPU, else
            host. For the two on a GPU, host memory must be pinned. A named engine never falls back.
        max_sms: let engine "cuda" use at most this many multiprocessors; None for all.

    Raises:
        InvalidArgument: an argument is not as above, an address is null, a size is negative or
            beyond 2**47, a range writes what it or another one reads or what another one writes, or
            it leaves the allocation that the driver knows it to begin in. Nothing has been copied
            then.
        Unavailable: the named engine is not here; or there is a CUDA context and a build without
            CUDA, which cannot tell where an address is: name engine "host" then.
        CudaError: CUDA refused the copy.
    """
    check_max_sms("copy_batch", max_sms)
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()  # what is copied is hidden behind addresses
    if not isinstance(engine, str) or engine not in NUMBERS:
        raise InvalidArgument(f"copy_batch: engine must be one of {[*NUMBERS]}, got {engine!r}")
    if not _library.has_cuda:
        _require_host(engine)
    arrays = [
        _as_int64("src_ptrs", src_ptrs),
        _as_int64("dst_ptrs", dst_ptrs),
        _as_int64("sizes", sizes),
    ]
    is_any, number = bool(is_src_access_order_any), NUMBERS[engine]
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
