"""KVView: a paged KV cache whose axes have names. Public as ``mooncake_kernels.KVView``."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .. import _library
from .._tensors import check_device, check_plain, have_addresses, versioned
from ..bad_ids import BadIds
from ..errors import InvalidArgument
from .layout import (
    HEADER,
    PLANE_FIELDS,
    RESOLVED_FIELDS,
    SIDE_FIELDS,
    Layout,
    Selection,
    own_order,
    packed_layout,
    parse_axes,
    parse_packed_axes,
    plan_values,
)

NOT_RESOLVED: tuple[int, int, int, Any] = (-1, -1, -1, None)


def gpu_index(device: torch.device) -> int:
    """Return the GPU that a plan's addresses are for, as its operators take it; -1 for none.

    Callers keep it: reading a device's type takes 0.2 us.
    """
    return device.index if device.type == "cuda" else -1


class PlanTensor:
    """The tensor of csrc/ops/copy_plan.h, and the same with a cache's addresses filled in.

    Attributes:
        values: the plan, without addresses.
        triton_planes: the planes' addresses on the device, for ``triton/kv.py``: on first use.
    """

    def __init__(self, values: list[int], dst_run_bytes: int | None = None):
        self.values = constants(values)
        src_run_bytes = values[1 + 2 * SIDE_FIELDS]
        self._dst_run_bytes = src_run_bytes if dst_run_bytes is None else dst_run_bytes
        self._resolved = NOT_RESOLVED
        self.triton_planes: Any = None

    @property
    def num_planes(self) -> int:
        return (self.values.numel() - HEADER) // PLANE_FIELDS

    def resolved(
        self, src: Sequence[torch.Tensor], dst: Sequence[torch.Tensor], gpu: int = -1
    ) -> torch.Tensor:
        """Return the plan with the tensors' addresses; cached until they move.

        Only the first tensor of each side is checked for that: checking all would take as long as
        the call. A side without tensors keeps its offsets. For a GPU, given by its index, host
        tensors must be pinned; their addresses are then those of the GPU.
        """
        of_src, of_dst = src[0].data_ptr() if src else 0, dst[0].data_ptr() if dst else 0
        known_src, known_dst, known_gpu, table = self._resolved
        if of_src != known_src or of_dst != known_dst or gpu != known_gpu:
            table = constants([0] * (HEADER + RESOLVED_FIELDS * self.num_planes))
            arguments = (self.values, table, self._dst_run_bytes, gpu)
            with unset_fake_temporarily():
                _library.call(_library.resolve_copy_plan, src, dst, *arguments)
            self._resolved = (of_src, of_dst, gpu, table)
        return table

    def __getstate__(self) -> dict[str, object]:  # a copy has its own tensors
        return self.__dict__ | {"_resolved": NOT_RESOLVED}


class BlockPlan(PlanTensor):
    """A selection and the numbers by which the operators copy it.

    Attributes:
        selection: what to copy.
        layouts: of src and dst.
        hops: the same in two copies, if it was done so.
        choices: what "auto" chose for it.
    """

    def __init__(self, src: Layout, dst: Layout, selection: Selection):
        self.selection, self.layouts = selection, (src, dst)
        self.hops: Any = None
        self.choices: dict[tuple, str | None] = {}
        super().__init__(plan_values(src, dst, selection))

    def __getstate__(self) -> dict[str, object]:
        return super().__getstate__() | {"hops": None, "choices": {}}


class PackedBlocks:
    """What packed blocks of a view look like, in one order of their axes, and how to copy them.

    Attributes:
        axes: of a block.
        sizes: of these axes.
        gather_plan, scatter_plan: from the view into packed blocks, and back.
    """

    def __init__(self, layout: Layout, order: tuple[str, ...], everything: Selection):
        packed = packed_layout(layout, order)
        self.axes = order
        self.sizes = tuple(layout.sizes[axis] for axis in order)
        self.gather_plan = BlockPlan(layout, packed, everything)
        self.scatter_plan = BlockPlan(packed, layout, everything)


def constants(values: list[int]) -> torch.Tensor:
    """Make a real int64 CPU tensor, whatever the default device, even among fake tensors."""
    if torch.compiler.is_compiling():
        return torch.tensor(values, device="cpu")
    with unset_fake_temporarily():
        return torch.tensor(values, device="cpu")


class KVView:
    """A paged KV cache whose axes have names.

    The names are ``layer``, ``kv`` (k is 0 and v is 1), ``block``, ``head``, ``token`` (its place
    in the block) and ``dim``. ``block`` and ``dim`` are required; ``dim`` is last and packed; the
    others may come in any order and be strided. Examples::

        KVView(layers, axes="kv block token head dim")         # vLLM's NHD: a tensor per layer
        KVView(tensor, axes="block layer kv head token dim")   # one tensor, block first
        KVView([k_layers, v_layers], axes="block token head dim")   # k and v apart
        KVView(layers, axes="block token dim")                 # MLA: one latent, no kv and no head
        KVView(states, axes="block dim")                       # one state for each block

    Args:
        tensors: one tensor; or a list of them, one per layer; or a list of two such lists, one for
            k and one for v. All of one shape, strides, dtype and device; no size but that of
            ``block`` may be 0; they must not require grad, or have a forward tangent. They are
            not copied, and must keep their memory while the view is in use. To be written to, a
            tensor must have memory for each of its elements, each axis stepping over all of those
            inside it, and share none of it with another one. No CUDA graph that captured a copy of
            the view's blocks may outlive it.
        axes: the names of a tensor's dimensions, separated by spaces.

    Attributes:
        tensors: all tensors, flat; with nested lists those of k come first.
        num_layers, num_kv, num_blocks, num_heads, block_size, head_dim: sizes (1 for an axis that
            does not exist); ``block_size`` is in tokens.
        has_tokens, has_heads: whether the axis exists.
        packed_axes: of a packed block, in the order that leaves the longest contiguous runs of this
            cache: ``"layer kv token head dim"`` for NHD. Axes that the cache does not have are
            named, too, and have size 1.
        dtype, device: of the tensors.
        gpu, has_addresses, layout, everything, versioned, packed, sums, span, bad_ids,
            gpu_bad_ids, registered, base: for this package's own use.

    Raises:
        InvalidArgument: the axes do not match the tensors, or the tensors each other.
    """

    def __init__(self, tensors: torch.Tensor | Sequence, axes: str):
        grid, given = _as_grid(tensors)
        self.tensors = [tensor for row in grid for tensor in row]
        first = self.tensors[0]
        names = parse_axes(axes, first.dim())
        for axis in given & set(names):
            raise InvalidArgument(
                f"KVView: axes must not name {axis!r}, which the list of tensors gives, "
                f"got {axes!r}"
            )
        _check_alike(self.tensors)
        sizes = {"layer": len(grid[0]), "kv": len(grid), "head": 1, "token": 1}
        sizes |= dict(zip(names, first.shape, strict=True))
        strides = dict.fromkeys(("layer", "kv", "head", "token"), 0)
        itemsize = first.element_size()
        steps = (step * itemsize for step in first.stride())
        strides |= dict(zip(names, steps, strict=True))
        for axis, size in sizes.items():
            if size == 0 and axis != "block":
                raise InvalidArgument(f"KVView: axis {axis!r} must have size 1 or more, got 0")
        if sizes["kv"] not in (1, 2):
            raise InvalidArgument(f"KVView: axis 'kv' must have size 1 or 2, got {sizes['kv']}")
        if sizes["dim"] > 1 and strides["dim"] != itemsize:
            raise InvalidArgument(
                f"KVView: axis 'dim' must be packed (stride 1), got stride {first.stride(-1)}"
            )
        self.registered, self.base = self.tensors, 0
        self.versioned = versioned(self.tensors)
        self.axes = " ".join(names)
        self.has_tokens, self.has_heads = "token" in names, "head" in names
        self.num_layers, self.num_kv = sizes["layer"], sizes["kv"]
        self.num_blocks, self.block_size = sizes["block"], sizes["token"]
        self.num_heads, self.head_dim = sizes["head"], sizes["dim"]
        self.dtype, self.device = first.dtype, first.device
        self.gpu, self.has_addresses = gpu_index(first.device), have_addresses(self.tensors)
        count = iter(range(len(self.tensors)))
        table = tuple(tuple(next(count) for _ in row) for row in grid)
        self.layout = Layout(sizes, strides, itemsize, table)
        layers = [(i, i) for i in range(self.num_layers)]
        self.everything = Selection(layers, self.num_kv, 0, 0, self.num_heads)
        self.packed = PackedBlocks(self.layout, own_order(self.layout, names), self.everything)
        self.packed_axes = " ".join(self.packed.axes)
        self._packed_as = {self.packed_axes: self.packed}
        self.sums: Any = None  # how its blocks are summed: made on first use
        self.span: Any = None  # where its tensors are: likewise, and again if they move
        names = ("gather_blocks: block_ids", "scatter_blocks: block_ids")
        self._shared: str | None = self.layout.shared_step()  # "": no memory is shared
        self.bad_ids = BadIds(self.device, names, (self.num_blocks, self.num_blocks))
        self.gpu_bad_ids: Any = None  # for a GPU that accesses it in pinned memory: on first use

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers, k and v."""
        elements = self.num_layers * self.num_kv * self.num_heads * self.block_size * self.head_dim
        return elements * self.layout.itemsize

    def packed_shape(self, num_blocks: int, axes: str | None = None) -> tuple[int, ...]:
        """Return the shape of n packed blocks: n, and the sizes of ``axes``.

        Args:
            num_blocks: n.
            axes: of a block, as for ``gather_blocks``; None for ``packed_axes``.
        """
        return (num_blocks, *self.packed_as("packed_shape", axes).sizes)

    def packed_as(self, op: str, axes: str | None) -> PackedBlocks:
        """Return packed blocks with axes in that order; for this package's own use."""
        if axes is None:
            return self.packed
        known = self._packed_as.get(axes) if isinstance(axes, str) else None
        if known is None:
            order = parse_packed_axes(op, axes)
            known = self._packed_as.get(" ".join(order))
        if known is None:
            known = PackedBlocks(self.layout, order, self.everything)
            self._packed_as[" ".join(order)] = known
        return known

    def check(self) -> None:
        """Wait for the current stream, and raise if a gather, scatter or checksum met a bad id.

        Does nothing on the CPU, where the calls themselves raise.

        Raises:
            InvalidArgument: an id of an earlier call was out of range; the message names it.
        """
        kept = [(self.device, self.bad_ids)]
        kept += [(self.device, self.sums[1])] if self.sums else []
        kept += [self.gpu_bad_ids] if self.gpu_bad_ids else []
        for device, bad in kept:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            bad.raise_if_any()

    def plane(self, layer: int, kv: int) -> torch.Tensor:
        """Return one layer's k or v as a strided view ``[block, head, token, dim]``."""
        for name, value, size in (("layer", layer, self.num_layers), ("kv", kv, self.num_kv)):
            if not 0 <= value < size:
                raise InvalidArgument(f"plane: {name} must be in [0, {size}), got {value}")
        index, offset = self.layout.plane(kv, layer)
        tensor = self.tensors[index]
        names = ("block", "head", "token", "dim")
        itemsize = self.layout.itemsize
        return tensor.as_strided(
            [self.layout.sizes[name] for name in names],
            [self.layout.strides[name] // itemsize for name in names],
            tensor.storage_offset() + offset // itemsize,
        )

    def check_writable(self, name: str) -> None:
        """Refuse elements that share memory; for this package's own use.

        The tensors of a list may alternate in one range of memory. The first write asks for it.
        """
        if self._shared is None and not torch.compiler.is_compiling() and self.has_addresses:
            self._shared = self._find_shared_tensors()
        if self._shared:
            raise InvalidArgument(
                f"{name} must have memory for each of its elements, got {self._shared}"
            )

    def _find_shared_tensors(self) -> str:
        """Tell which tensors share elements, if two do; else ""."""
        if self.num_blocks == 0:
            return ""
        addresses = sorted((tensor.data_ptr(), i) for i, tensor in enumerate(self.tensors))
        meet = lru_cache(None)(self.layout.tensors_meet)  # few distances are distinct
        sizes_and_strides = zip(self.tensors[0].shape, self.tensors[0].stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in sizes_and_strides)
        extent = (last + 1) * self.layout.itemsize
        for k, (begin, i) in enumerate(addresses):
            if begin == 0:  # freed: the copy says so
                continue
            for other, j in islice(addresses, k + 1, None):
                if other >= begin + extent:
                    break
                if meet(other - begin):
                    return f"some that tensors {min(i, j)} and {max(i, j)} share"
        return ""

    def __repr__(self) -> str:
        return (
            f"KVView({self.axes!r}, layers={self.num_layers}, kv={self.num_kv}, "
            f"blocks={self.num_blocks}, heads={self.num_heads}, block_size={self.block_size}, "
            f"head_dim={self.head_dim}, {self.dtype}, {self.device})"
        )


def _as_grid(tensors: torch.Tensor | Sequence) -> tuple[list[list[torch.Tensor]], set[str]]:
    """Return tensors as ``[kv][layer]``, and the axes that the lists stand for."""
    if isinstance(tensors, torch.Tensor):
        return [[tensors]], set()
    rows = list(tensors) if isinstance(tensors, (list, tuple)) else []
    if rows and all(isinstance(row, torch.Tensor) for row in rows):
        return [rows], {"layer"}
    nested = [list(row) if isinstance(row, (list, tuple)) else [row] for row in rows]
    if len(nested) != 2 or len(nested[0]) != len(nested[1]) or not nested[0]:
        raise InvalidArgument(
            "KVView: tensors must be a tensor, a list with one tensor a layer, or two such lists "
            f"of equal length (k and v), got {_told(tensors)}"
        )
    for tensor in (tensor for row in nested for tensor in row):
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(
                f"KVView: tensors must hold torch tensors, got {type(tensor).__name__}"
            )
    return nested, {"layer", "kv"}


def _told(tensors: Any) -> str:
    count = f" of {len(tensors)} entries" if isinstance(tensors, (list, tuple)) else ""
    return type(tensors).__name__ + count


def _check_alike(tensors: list[torch.Tensor]) -> None:
    first = tensors[0]
    check_device("KVView", "tensors", first)
    for i, tensor in enumerate(tensors):
        check_plain(f"KVView: tensor {i}", tensor)
        for what in ("shape", "dtype", "device"):
            mine, other = getattr(first, what), getattr(tensor, what)
            if mine != other:
                raise InvalidArgument(
                    f"KVView: tensors must be alike, got {what} {other} at tensor {i} and {mine} "
                    "at tensor 0"
                )
        if tensor.stride() != first.stride():
            raise InvalidArgument(
                f"KVView: tensors must be alike, got strides {tensor.stride()} at tensor {i} and "
                f"{first.stride()} at tensor 0"
            )
