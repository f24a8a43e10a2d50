"""Bad block ids: how a kernel reports one without the host waiting for it."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .errors import ChecksumError, InvalidArgument
from .small_buffer_cache import SmallBufferCache

WORDS = 3  # side (0: none, 1: src, 2: dst, -1: being written), index, id; BadId in copy_blocks.h
SHARED = -(1 << 30) - 1  # in place of all ids of dst, if the same run reads their memory
BAD_CHECKSUM = 3  # in place of a side; csrc/kv/transform_blocks.h
ROW_WORDS, NUM_ROWS = 4, 256
NUM_RESTING = 1 << 16  # 2 MiB, once as many views and plans were dropped


class BadIds:
    """Where kernels report a bad block id of one view or plan.

    On CUDA that is a row of pinned host memory, which both a kernel and the host access. Rows are
    lent, and lent again much later, so a kernel that is still queued when its plan is dropped
    writes to valid memory, and reports to no one. Otherwise each object has its own row.

    Args:
        device: of the cache.
        names: names of the ids in errors, (src, dst).
        num_blocks: exclusive upper bounds of the ids, (src, dst).

    Attributes:
        address: where a CUDA kernel writes; 0 for nowhere. A plain number, for compiled code
            cannot ask a tensor for it.
        seen: the memory of ``words``, in whatever mode torch is; None while there is none, so that
            nothing can have been reported.
    """

    def __init__(self, device: torch.device, names: tuple[str, str], num_blocks: tuple[int, int]):
        self._made_of = (device, names, num_blocks)
        self._words: torch.Tensor | None = None
        self.seen: np.ndarray | None = None
        self.address = 0
        # While a graph is being traced there is no row to lend, and no reader.
        if device.type == "cuda" and not torch.compiler.is_compiling():
            with unset_fake_temporarily():
                self._words = row = _rows.lend(self)
                self.seen, self.address = row.numpy(), row.data_ptr()

    @property
    def words(self) -> torch.Tensor:
        if self._words is None:
            # Out of inference mode they could not be reset otherwise.
            with unset_fake_temporarily(), torch.inference_mode(False):
                self._words = torch.zeros(WORDS, dtype=torch.int64, device="cpu")
                self.seen = self._words.numpy()
        return self._words

    def error(self, side: int, index: int, block_id: int) -> InvalidArgument | ChecksumError:
        """Make the error for one id."""
        _, names, num_blocks = self._made_of
        if side == BAD_CHECKSUM:
            return ChecksumError(
                f"{names[0]}[{index}]: block {block_id} must have the checksum that was given"
            )
        if block_id == SHARED:
            return InvalidArgument(
                f"{names[side - 1]} must not share memory with the blocks that are read, got some "
                "that do: nothing was copied"
            )
        return _out_of_range(names[side - 1], index, num_blocks[side - 1], block_id)

    def check(self, side: int, ids: torch.Tensor) -> None:
        """Raise for the first bad id in a CPU tensor."""
        _, names, num_blocks = self._made_of
        check_ids(names[side - 1], ids, num_blocks[side - 1])

    def raise_if_any(self) -> None:
        """Raise for the reported id or checksum, if any, and clear it."""
        if self.seen is None:
            return
        side = int(self.seen[0])  # first: a kernel writes it last
        if side > 0:
            index, block_id = self.seen[1:WORDS].tolist()
            self.seen[:] = 0
            raise self.error(side, index, block_id)

    def on(self, device: torch.device) -> "BadIds":
        """Make the same for kernels of another device."""
        return BadIds(device, *self._made_of[1:])

    def __reduce__(self) -> tuple[Any, ...]:  # a copy has its own words
        return BadIds, self._made_of


def check_ids(name: str, ids: torch.Tensor, num_ids: int) -> None:
    """Raise for the first bad id in a CPU tensor."""
    for index in ((ids < -1) | (ids >= num_ids)).nonzero().flatten().tolist():
        raise _out_of_range(name, index, num_ids, int(ids[index]))


def _out_of_range(name: str, index: int, num_ids: int, given: int) -> InvalidArgument:
    return InvalidArgument(f"{name}[{index}] must be -1 or in [0, {num_ids}), got {given}")


def _new_rows() -> Iterable[torch.Tensor]:
    # Without CUDA no kernel runs, and nothing can be pinned.
    pinned = torch.cuda.is_available()
    shape = (NUM_ROWS, ROW_WORDS)
    return torch.zeros(shape, dtype=torch.int64, device="cpu", pin_memory=pinned).unbind()


_rows = SmallBufferCache(_new_rows, NUM_RESTING)
