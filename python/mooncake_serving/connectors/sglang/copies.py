"""SGLang's pools as ``KVView``s, and its copies to and from staging and host memory by our kernels.

Nothing of SGLang is imported until ``use_staging_copies`` is called.
"""

import contextlib
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch

import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.kv.execute import BlockIds
from mooncake_serving.connectors.engine_versions import check_parameters, check_version

VERSIONS = ("0.5.23",)
MAX_SMS = 4  # what the copies of host pools may use

HOST_LAYOUTS = {  # of host pools: the axis that holds slots, if any, and the axes then
    "layer_first": (2, "kv layer block token head dim"),
    "page_first": (1, "kv block token layer head dim"),
    "page_first_direct": (None, "kv block layer token head dim"),
    "page_head": (None, "kv block head token layer dim"),
}
GATHER = (
    "k_buffers",
    "v_buffers",
    "page_indices_np",
    "staging_buffer",
    "src_head_start",
    "num_heads",
    "page_size",
)
SCATTER = (
    "staging_buffer_view",
    "k_buffers",
    "v_buffers",
    "page_idx_tensor",
    "page_size",
    "prefill_attn_tp_size",
    "decode_attn_tp_size",
    "dst_tp_rank",
    "total_kv_heads",
)


def device_view(
    k_buffers: Sequence[torch.Tensor], v_buffers: Sequence[torch.Tensor], page_size: int
) -> mk.KVView:
    """Return the pool of a GPU, ``MHATokenToKVPool.k_buffer`` and ``v_buffer``, as a view.

    A block of the view is a page; a slot, as in ``CopyPlan.run_slots``, is a token's index in the
    pool. Page 0 is the one that SGLang pads with.

    Args:
        k_buffers: a tensor for each layer, ``[slot, head, dim]``.
        v_buffers: likewise.
        page_size: in tokens.

    Raises:
        InvalidArgument: the tensors have another form, or slots that are not whole pages.
    """
    for name, buffers in (("k_buffers", k_buffers), ("v_buffers", v_buffers)):
        shapes = sorted({tuple(t.shape) for t in buffers})
        if any(len(shape) != 3 or shape[0] % page_size for shape in shapes):
            raise InvalidArgument(
                f"device_view: {name} must be [slot, head, dim] with whole pages of {page_size} "
                f"slots, got {shapes}"
            )
    pages = [[t.unflatten(0, (-1, page_size)) for t in side] for side in (k_buffers, v_buffers)]
    return mk.KVView(pages, "block token head dim")


def host_view(buffer: torch.Tensor, layout: str, page_size: int) -> mk.KVView:
    """Return a pool in host memory, ``MHATokenToKVPoolHost.kv_buffer``, as a view.

    Args:
        buffer: k and v of all layers, ``[2, ...]``.
        layout: of the pool: "layer_first", "page_first", "page_first_direct" or "page_head".
        page_size: in tokens.

    Raises:
        InvalidArgument: there is no such layout, or the buffer has not its form.
    """
    if layout not in HOST_LAYOUTS:
        raise InvalidArgument(
            f"host_view: layout must be {', '.join(HOST_LAYOUTS)}, got {layout!r}"
        )
    slots, axes = HOST_LAYOUTS[layout]
    num_axes = len(axes.split()) - (slots is not None)
    if buffer.dim() != num_axes or (slots is not None and buffer.shape[slots] % page_size):
        raise InvalidArgument(
            f"host_view: buffer must have {num_axes} axes, of whole pages of {page_size} slots, "
            f"for {layout}, got {tuple(buffer.shape)}"
        )
    if slots is not None:
        buffer = buffer.unflatten(slots, (-1, page_size))
    view = mk.KVView(buffer, axes)
    if view.block_size != page_size:
        raise InvalidArgument(
            f"host_view: page_size must be that of buffer, {view.block_size}, got {page_size}"
        )
    return view


class Staging:
    """Heads of pages, between a GPU's pool and staging memory in SGLang's order.

    The bytes are those of SGLang's ``gather_all_layers_to_staging``: all layers of k, then all of
    v, each ``[token, head, dim]``.

    Args:
        k_buffers: as for ``device_view``, as the others.
        v_buffers: of the same layers.
        page_size: in tokens.
    """

    def __init__(
        self,
        k_buffers: Sequence[torch.Tensor],
        v_buffers: Sequence[torch.Tensor],
        page_size: int,
    ):
        self._pool = device_view(k_buffers, v_buffers, page_size)

    def num_bytes(self, num_pages: int, num_heads: int) -> int:
        """Return what so many heads of so many pages take."""
        pool = self._pool
        row = pool.head_dim * pool.dtype.itemsize
        return 2 * pool.num_layers * num_pages * pool.block_size * num_heads * row

    def gather(
        self, pages: BlockIds, staging: torch.Tensor, first_head: int, num_heads: int
    ) -> int:
        """Copy heads of pages into staging memory, in the current stream; return their bytes.

        Raises:
            InvalidArgument: a page or a head is not in the pool, or the memory is too small.
        """
        view = self._staging_view("gather", staging, len(pages), num_heads)
        plan = mk.CopyPlan(self._pool, view, src_heads=slice(first_head, first_head + num_heads))
        plan.run(pages, _range_like(pages))
        plan.check()  # the memory is sent next, by a thread of the host
        return self.num_bytes(len(pages), num_heads)

    def scatter(
        self, staging: torch.Tensor, pages: BlockIds, first_head: int, num_heads: int
    ) -> None:
        """Copy staging memory into heads of pages, in the current stream.

        Raises:
            InvalidArgument: as for ``gather``.
        """
        view = self._staging_view("scatter", staging, len(pages), num_heads)
        plan = mk.CopyPlan(view, self._pool, dst_heads=slice(first_head, first_head + num_heads))
        plan.run(_range_like(pages), pages)

    def _staging_view(
        self, op: str, staging: torch.Tensor, num_pages: int, num_heads: int
    ) -> mk.KVView:
        pool, needed = self._pool, self.num_bytes(num_pages, num_heads)
        if staging.nbytes < needed:
            raise InvalidArgument(
                f"Staging.{op}: staging must have {needed} bytes for {num_pages} pages of "
                f"{num_heads} heads, got {staging.nbytes}"
            )
        shape = (2, pool.num_layers, num_pages, pool.block_size, num_heads, pool.head_dim)
        part = staging.view(torch.uint8)[:needed].view(pool.dtype).view(shape)
        return mk.KVView(part, "kv layer block token head dim")


def _range_like(pages: BlockIds) -> BlockIds:
    if isinstance(pages, torch.Tensor):
        return torch.arange(len(pages), device=pages.device)
    return range(len(pages))


def backup_pages(
    layers: Sequence[torch.Tensor],
    host: torch.Tensor,
    slots: torch.Tensor,
    host_slots: torch.Tensor,
    page_size: int,
) -> None:
    """Copy pages of all layers from the pool of a GPU to one in host memory, in the current stream.

    For the host pool's layout "page_first_direct", in which a page of a layer is one range of
    bytes. Between others use a ``CopyPlan`` of ``device_view`` and ``host_view``.

    Args:
        layers: ``k_buffer + v_buffer``, ``[slot, head, dim]`` each.
        host: ``[2, page, layer, token, head, dim]``, pinned.
        slots: an index of the GPU's pool for each token, whole pages in a row, as HiCache has them.
        host_slots: likewise, of the host's.
        page_size: in tokens.

    Raises:
        InvalidArgument: as for ``copy_batch``.
    """
    mk.copy_batch(*_ranges(layers, host, slots, host_slots, page_size), max_sms=MAX_SMS)


def load_pages(
    layers: Sequence[torch.Tensor],
    host: torch.Tensor,
    slots: torch.Tensor,
    host_slots: torch.Tensor,
    page_size: int,
) -> None:
    """Copy pages back: ``backup_pages`` in the other direction."""
    on_device, on_host, sizes = _ranges(layers, host, slots, host_slots, page_size)
    mk.copy_batch(on_host, on_device, sizes, is_src_access_order_any=True, max_sms=MAX_SMS)


def _ranges(
    layers: Sequence[torch.Tensor],
    host: torch.Tensor,
    slots: torch.Tensor,
    host_slots: torch.Tensor,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return addresses on the device and on the host, and sizes."""
    pages, host_pages = (i.cpu()[::page_size] // page_size for i in (slots, host_slots))
    page_bytes = host[0, 0, 0].nbytes
    kv_stride, page_stride, layer_stride = (s * host.element_size() for s in host.stride()[:3])
    kv, layer = (torch.arange(n) for n in (2, len(layers) // 2))
    bases = (kv[:, None] * kv_stride + layer * layer_stride).flatten() + host.data_ptr()
    device_bases = torch.tensor([t.data_ptr() for t in layers])
    on_device = (device_bases[:, None] + pages.long() * page_bytes).flatten()
    on_host = (bases[:, None] + host_pages.long() * page_stride).flatten()
    return on_device, on_host, torch.full_like(on_host, page_bytes)


def use_staging_copies() -> None:
    """Let SGLang's staging buffers between prefill and decode be filled and read by ``CopyPlan``s.

    It replaces two functions of ``sglang.srt.disaggregation.common.staging_buffer``, in this
    process; the bytes in the buffer stay as they were, so that the other side need not do the same.
    Our plugin calls it in each process of SGLang, see ``MOONCAKE_KERNELS_ENGINE_COPIES``.
    Idempotent.

    Never run on a GPU inside SGLang.

    Raises:
        Unavailable: SGLang is not installed, or is one that this was not written for.
    """
    hook = "use_staging_copies"
    check_version(hook, ("sglang",), VERSIONS)
    theirs = import_module("sglang.srt.disaggregation.common.staging_buffer")
    replace_staging_copies(theirs)


def replace_staging_copies(theirs: Any) -> None:
    """Replace the functions of that module."""
    if getattr(theirs, "has_our_copies", False):
        return
    check_parameters("use_staging_copies", theirs.gather_all_layers_to_staging, [GATHER])
    check_parameters("use_staging_copies", theirs.scatter_staging_to_kv, [SCATTER])

    def gather_all_layers_to_staging(
        k_buffers: list[torch.Tensor],
        v_buffers: list[torch.Tensor],
        page_indices_np: np.ndarray,
        staging_buffer: Any,
        src_head_start: int,
        num_heads: int,
        page_size: int,
    ) -> int:
        staging = Staging(k_buffers, v_buffers, page_size)
        with _stream_of(staging_buffer):
            pages = np.asarray(page_indices_np, dtype=np.int64)
            return staging.gather(pages, staging_buffer.buffer, src_head_start, num_heads)

    def scatter_staging_to_kv(
        staging_buffer_view: torch.Tensor,
        k_buffers: list[torch.Tensor],
        v_buffers: list[torch.Tensor],
        page_idx_tensor: torch.Tensor,
        page_size: int,
        prefill_attn_tp_size: int,
        decode_attn_tp_size: int,
        dst_tp_rank: int,
        total_kv_heads: int,
    ) -> None:
        staging = Staging(k_buffers, v_buffers, page_size)
        num_writers = max(1, prefill_attn_tp_size // max(1, decode_attn_tp_size))
        sizes = (prefill_attn_tp_size, decode_attn_tp_size)
        offset = 0
        for writer in range(num_writers):  # each has sent its heads
            _, num_heads, first_head, _ = theirs.compute_head_slice_params(
                *sizes, writer, dst_tp_rank, total_kv_heads
            )
            part = staging_buffer_view.view(torch.uint8)[offset:]
            staging.scatter(part, page_idx_tensor, first_head, num_heads)
            offset += staging.num_bytes(len(page_idx_tensor), num_heads)

    for ours in (gather_all_layers_to_staging, scatter_staging_to_kv):
        setattr(theirs, ours.__name__, ours)
    theirs.has_our_copies = True


@contextlib.contextmanager
def _stream_of(staging_buffer: Any) -> Iterator[None]:
    """Use the stream on which SGLang gathers, after what its own stream has queued."""
    if staging_buffer.buffer.device.type != "cuda":
        yield
        return
    stream = staging_buffer.get_gather_stream()
    stream.wait_stream(staging_buffer.producer_stream())
    with torch.cuda.stream(stream):
        yield
