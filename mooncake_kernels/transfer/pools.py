"""Pools of equally sized blocks: paged requests."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import _host
from .._arguments import as_integer, as_integers
from ..errors import InvalidArgument
from .arguments import Integers, as_column
from .handles import Region

END = 1 << 64  # of addresses

Fields = tuple[tuple[int, ...], int, int, int]  # of a pool, in their order
# Of blocks: local, remote and their sizes; or a pool's fields and ids, local and remote.
Where = tuple[Any, Any, Any] | tuple[Fields, np.ndarray, Fields, np.ndarray]


@dataclass(frozen=True, init=False)
class BlockPool:
    """Blocks of one size at ``base + id * stride_bytes``, in one plane or several.

    A plane is what one tensor of a KV cache holds of all blocks: a layer's keys, its values. A
    pool describes memory but does not hold it. Send a peer the description as it is, pickled or as
    JSON (``BlockPool(**json.loads(json.dumps(dataclasses.asdict(pool))))``)::

        pool = mk.BlockPool([t.data_ptr() for t in layers], num_blocks, layers[0][0].nbytes)
        engine.write_blocks(peer, pool.blocks(src_ids), peer_pool.blocks(dst_ids)).wait()

    Part of each block (some of its heads) is a pool of its own: the same stride, a smaller block,
    and bases offset accordingly.

    Args:
        planes: the address of block 0, or the ``Region`` that begins with it; or a sequence of
            these, one per plane; also an array or tensor of addresses.
        num_blocks: ids are 0 to ``num_blocks - 1``, the same in all planes.
        block_bytes: size of a block in one plane.
        stride_bytes: from a block to the next, at least ``block_bytes``; None: packed.

    Attributes:
        planes: the addresses, one per plane.
        num_blocks: as given.
        block_bytes: as given.
        stride_bytes: in bytes, even if None was given.

    Raises:
        InvalidArgument: a number is out of range, the pool is larger than its region, or a block
            overlaps one of another plane.
    """

    planes: tuple[int, ...]
    num_blocks: int
    block_bytes: int
    stride_bytes: int

    def __init__(
        self,
        planes: int | Region | Sequence[int | Region],
        num_blocks: int,
        block_bytes: int,
        *,
        stride_bytes: int | None = None,
    ):
        num_blocks = _as_count("num_blocks", num_blocks, 1)
        block_bytes = _as_count("block_bytes", block_bytes, 1)
        stride = block_bytes
        if stride_bytes is not None:
            stride = _as_count("stride_bytes", stride_bytes, block_bytes)
        listed = _as_list(planes)
        if len(listed) == 0:
            raise InvalidArgument("BlockPool: planes must be at least one address, got none")
        num_bytes = (num_blocks - 1) * stride + block_bytes
        if num_bytes > END:
            raise InvalidArgument(
                f"BlockPool: the pool must end below 2**64, got {num_bytes} bytes"
            )
        addresses = tuple(_as_base(i, plane, num_bytes) for i, plane in enumerate(listed))
        object.__setattr__(self, "planes", addresses)
        object.__setattr__(self, "num_blocks", num_blocks)
        object.__setattr__(self, "block_bytes", block_bytes)
        object.__setattr__(self, "stride_bytes", stride)
        self._check_planes(num_bytes)

    def blocks(self, ids: Integers) -> "Blocks":
        """Select blocks of this pool, for ``write_blocks`` and ``read_blocks``.

        Args:
            ids: ``[n]`` integers from 0 to ``num_blocks - 1``; int32 and int64 arrays and CPU
                tensors are not copied. They are read when the request is made.

        Returns:
            The blocks, in this order.

        Raises:
            InvalidArgument: the ids are not ``[n]`` integers.
        """
        return Blocks(self, as_column("blocks", "ids", ids))

    def _check_planes(self, num_bytes: int) -> None:
        order = sorted(range(len(self.planes)), key=self.planes.__getitem__)
        for rank, i in enumerate(order):
            for j in itertools.islice(order, rank + 1, None):
                distance = self.planes[j] - self.planes[i]
                if distance >= num_bytes:  # so are all planes behind it
                    break
                steps, offset = divmod(distance, self.stride_bytes)
                reaches_next = self.stride_bytes - offset < self.block_bytes
                if offset < self.block_bytes or (reaches_next and steps + 1 < self.num_blocks):
                    raise InvalidArgument(
                        f"BlockPool: planes must not overlap, got planes[{i}] = "
                        f"{self.planes[i]:#x} and planes[{j}] = {self.planes[j]:#x}"
                    )


@dataclass(eq=False, slots=True)  # not frozen: that takes as long as posting many blocks
class Blocks:
    """Blocks of a pool: what ``BlockPool.blocks`` returns.

    Attributes:
        pool: the pool.
        ids: the ids of the blocks.
    """

    pool: BlockPool
    ids: np.ndarray


def take_addresses(addresses: Integers, indices: Integers) -> np.ndarray:
    """Return ``addresses[indices]``, for ``write_blocks`` and ``read_blocks``.

    Of blocks that lie anywhere: keep their addresses, and take those of each request. Checks and
    copies in one pass, where numpy needs several, and takes negative indices for others.

    Args:
        addresses: ``[m]`` integers, at best uint64.
        indices: ``[n]`` integers from 0 to ``m - 1``, at best int32, int64 or uint64.

    Returns:
        ``[n]`` uint64.

    Raises:
        InvalidArgument: an argument is no such integers; the message names the index.
    """
    taken = _host.take_addresses(addresses, indices)
    if taken is not None:
        return taken
    op = "take_addresses"
    values = as_integers(op, "addresses", addresses, "[m]")
    if values.ndim != 1:
        raise InvalidArgument(f"{op}: addresses must be [m] integers, got shape {values.shape}")
    places = as_column(op, "indices", indices)
    count = len(values)
    is_outside = (places < 0) | (places >= count)
    if is_outside.any():
        bad = int(np.argmax(is_outside))
        raise InvalidArgument(
            f"{op}: indices must be from 0 to {count - 1}, got {places[bad]} at {bad}"
        )
    return values[places.astype(np.int64, copy=False)]


def as_paged(op: str, local: Any, remote: Any, sizes: Any) -> Where:
    """What the host code takes for blocks of pools, whose ids it checks; others as given."""
    if not isinstance(local, Blocks) and not isinstance(remote, Blocks):
        return local, remote, sizes
    if not isinstance(local, Blocks) or not isinstance(remote, Blocks):
        raise InvalidArgument(
            f"{op}: local_addresses and remote_addresses must both be blocks of pools or both be "
            f"arrays, got {type(local).__name__} and {type(remote).__name__}"
        )
    if sizes is not None:
        raise InvalidArgument(f"{op}: sizes must be None for blocks of pools, got {sizes!r:.80}")
    return _fields(local.pool), local.ids, _fields(remote.pool), remote.ids


def _fields(pool: BlockPool) -> Fields:  # not kept in the pool: vars() and pickle would show them
    return pool.planes, pool.num_blocks, pool.block_bytes, pool.stride_bytes


def _as_list(planes: Any) -> Sequence[Any]:
    is_array = isinstance(planes, np.ndarray | torch.Tensor)
    is_memory = isinstance(planes, bytes | bytearray | memoryview | str)
    if is_memory or (is_array and planes.ndim != 1):
        what = f"{planes.ndim} dimensions" if is_array else type(planes).__name__
        raise InvalidArgument(f"BlockPool: planes must be [n] addresses or one, got {what}")
    if is_array:
        return planes.tolist()
    return planes if isinstance(planes, Sequence) else [planes]


def _as_count(argument: str, value: Any, low: int) -> int:
    return as_integer("BlockPool", argument, value, low, END - 1)


def _as_base(i: int, plane: Any, num_bytes: int) -> int:
    if not isinstance(plane, Region):
        return as_integer("BlockPool", f"planes[{i}]", plane, 0, END - num_bytes)
    if plane.num_bytes < num_bytes:
        raise InvalidArgument(
            f"BlockPool: planes[{i}] must be a region of at least {num_bytes} bytes, got "
            f"{plane.num_bytes}"
        )
    return plane.address
