"""Lists of descriptors: ``nixlXferDList`` and ``nixlRegDList``, and what may be given for them.

Rows are ``[n, 3]`` uint64: (address, bytes, device). Of memory, the address is a pointer; of a
file, the offset, and the device is its descriptor, or any number that its registration gave it.
"""

import enum
import operator
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .errors import nixlInvalidParamError, nixlNotFoundError


class nixl_mem_t(enum.IntEnum):  # noqa: N801
    """Kinds of memory."""

    DRAM_SEG = 0
    VRAM_SEG = 1
    BLK_SEG = 2
    OBJ_SEG = 3
    FILE_SEG = 4


MEM_TYPES = {
    "DRAM": nixl_mem_t.DRAM_SEG,
    "VRAM": nixl_mem_t.VRAM_SEG,
    "FILE": nixl_mem_t.FILE_SEG,
    "BLOCK": nixl_mem_t.BLK_SEG,
    "OBJ": nixl_mem_t.OBJ_SEG,
    "cpu": nixl_mem_t.DRAM_SEG,
    "cuda": nixl_mem_t.VRAM_SEG,
}
_INTEGERS = frozenset("iu")


class DescList:
    """Descriptors of one kind of memory.

    Args:
        type: their kind.
        descs: ``[n, 3]`` int64 or uint64, or a list of tuples; or an integer, which is ignored.

    Attributes:
        rows: ``[n, 3]`` uint64.
    """

    num_fields = 3  # of a tuple

    def __init__(self, type: nixl_mem_t, descs: Any = 0):
        self._type = nixl_mem_t(type)
        self.rows = np.empty((0, 3), np.uint64) if _is_integer(descs) else as_rows(descs)

    def getType(self) -> nixl_mem_t:  # noqa: N802
        """The kind of memory."""
        return self._type

    def descCount(self) -> int:  # noqa: N802
        """How many descriptors there are."""
        return len(self.rows)

    def isEmpty(self) -> bool:  # noqa: N802
        """Whether there are none."""
        return len(self.rows) == 0

    def __len__(self) -> int:
        return len(self.rows)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._type == other._type and np.array_equal(self.rows, other.rows)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.rows)} of {self._type.name})"

    def __getitem__(self, index: int) -> tuple:
        return tuple(self.rows[self._place(index)].tolist())

    def __setitem__(self, index: int, desc: tuple) -> None:
        self.rows[self._place(index)] = self._row(desc)

    def append(self, desc: tuple) -> None:
        """Add a descriptor."""
        self.rows = np.concatenate([self.rows, self._row(desc)[None]])

    def addDesc(self, desc: tuple) -> None:  # noqa: N802
        """Add a descriptor."""
        self.append(desc)

    def index(self, desc: tuple) -> int:
        """Where the first equal descriptor is.

        Raises:
            nixlNotFoundError: there is none.
        """
        found = np.flatnonzero((self.rows == self._row(desc)).all(1))
        if not len(found):
            raise nixlNotFoundError(f"index: desc must be in the list, got {desc!r:.80}")
        return int(found[0])

    def remDesc(self, index: int) -> None:  # noqa: N802
        """Remove a descriptor."""
        self.rows = np.delete(self.rows, self._place(index), 0)

    def clear(self) -> None:
        """Remove all descriptors."""
        self.rows = self.rows[:0]

    def _place(self, index: int) -> int:
        place = operator.index(index)
        if not 0 <= place < len(self.rows):
            raise IndexError(f"index must be from 0 to {len(self.rows) - 1}, got {index}")
        return place

    def _row(self, desc: tuple) -> np.ndarray:
        if not isinstance(desc, tuple) or len(desc) != self.num_fields:
            raise nixlInvalidParamError(
                f"desc must be a tuple of {self.num_fields}, got {desc!r:.80}"
            )
        return as_rows([desc[:3]])[0]


class nixlXferDList(DescList):  # noqa: N801
    """Descriptors of a transfer: tuples (address, bytes, device)."""


class nixlRegDList(DescList):  # noqa: N801
    """Descriptors of a registration: tuples (address, bytes, device, text).

    Attributes:
        metas: a text each, as bytes: of a file its path, or flags and path ("rw,create:/path").
    """

    num_fields = 4

    def __init__(self, type: nixl_mem_t, descs: Any = 0):
        metas: list[bytes] | None = None
        if isinstance(descs, list):
            for desc in descs:
                if not isinstance(desc, tuple) or len(desc) != 4:
                    raise nixlInvalidParamError(
                        "descs must be tuples (address, bytes, device, text) for a registration, "
                        f"got {desc!r:.80}"
                    )
            metas = [_as_text(desc[3]) for desc in descs]
            descs = [desc[:3] for desc in descs]
        super().__init__(type, descs)
        self.metas = metas if metas is not None else [b""] * len(self.rows)

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other) and self.metas == other.metas  # type: ignore[attr-defined]

    __hash__ = None

    def __getitem__(self, index: int) -> tuple:
        return (*super().__getitem__(index), self.metas[index])

    def __setitem__(self, index: int, desc: tuple) -> None:
        super().__setitem__(index, desc)
        self.metas[index] = _as_text(desc[3])

    def append(self, desc: tuple) -> None:
        """Add a descriptor."""
        super().append(desc)
        self.metas.append(_as_text(desc[3]))

    def remDesc(self, index: int) -> None:  # noqa: N802
        """Remove a descriptor."""
        super().remDesc(index)
        del self.metas[index]

    def clear(self) -> None:
        """Remove all descriptors."""
        super().clear()
        self.metas.clear()

    def trim(self) -> nixlXferDList:
        """The same descriptors without their texts."""
        return nixlXferDList(self._type, self.rows.copy())


def as_rows(descs: Any) -> np.ndarray:
    """``[n, 3]`` uint64, a copy only where that is needed.

    Raises:
        nixlInvalidParamError: it is neither ``[n, 3]`` integers nor a list of three integers each.
    """
    if isinstance(descs, np.ndarray):
        if descs.dtype.kind not in _INTEGERS or descs.ndim != 2 or descs.shape[1] != 3:
            raise nixlInvalidParamError(
                f"descs must be [n, 3] integers, got {descs.dtype} of shape {descs.shape}"
            )
        return np.ascontiguousarray(descs.astype(np.uint64, copy=False))
    try:
        rows = np.array(descs)
        if rows.dtype.kind not in _INTEGERS:  # also a mix of those below and above 2**63
            rows = np.array([[operator.index(one) for one in desc] for desc in descs], np.uint64)
        if rows.dtype.kind == "i" and rows.size and rows.min() < 0:
            raise ValueError
        return rows.astype(np.uint64, copy=False).reshape(len(descs), 3)
    except (TypeError, ValueError, OverflowError):
        raise nixlInvalidParamError(
            f"descs must be tuples of three integers from 0 to 2**64 - 1, got {descs!r:.80}"
        ) from None


def expand_strided(runs: np.ndarray) -> np.ndarray:
    """``[m, 3]`` descriptors of ``[n, 5]`` runs (address, bytes, device, stride, count).

    Equivalent to::

        for address, num_bytes, device, stride, count in runs:
            for i in range(count):
                rows.append((address + i * stride, num_bytes, device))
    """
    if runs.dtype.kind not in _INTEGERS:
        raise nixlInvalidParamError(f"xfer_list must be [n, 5] integers, got {runs.dtype}")
    runs = runs.astype(np.uint64, copy=False)
    counts = runs[:, 4]
    # Each is looked at before their sum, which may overflow.
    if (counts >= 1 << 32).any() or int(counts.sum()) >= 1 << 32:
        raise nixlInvalidParamError("xfer_list must expand to less than 2**32 descriptors")
    counts = counts.astype(np.int64)
    rows = np.repeat(runs[:, :3], counts, axis=0)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    steps = (np.arange(len(rows)) - starts).astype(np.uint64)
    rows[:, 0] += steps * np.repeat(runs[:, 3], counts)
    return rows


def as_xfer_descs(descs: Any, mem_type: str | None) -> nixlXferDList:
    """``descs`` as a list for transfers; see ``nixl_agent.get_xfer_descs``."""
    if isinstance(descs, nixlXferDList):
        return descs
    if isinstance(descs, nixlRegDList):
        raise nixlInvalidParamError(
            "get_xfer_descs: descs must be a list for transfers, got one for registration: "
            "use its trim()"
        )
    return nixlXferDList(*_typed("get_xfer_descs", descs, mem_type))


def as_reg_descs(descs: Any, mem_type: str | None) -> nixlRegDList:
    """``descs`` as a list for registration; see ``nixl_agent.get_reg_descs``."""
    if isinstance(descs, nixlRegDList):
        return descs
    if isinstance(descs, nixlXferDList):
        raise nixlInvalidParamError(
            "get_reg_descs: descs must be a list for registration, got one for transfers"
        )
    return nixlRegDList(*_typed("get_reg_descs", descs, mem_type))


def as_mem_type(op: str, mem_type: str | None) -> nixl_mem_t:
    """The kind of memory of that name."""
    if not isinstance(mem_type, str) or mem_type not in MEM_TYPES:
        raise nixlInvalidParamError(
            f"{op}: mem_type must be one of {', '.join(MEM_TYPES)}, got {mem_type!r}"
        )
    return MEM_TYPES[mem_type]


def _typed(op: str, descs: Any, mem_type: str | None) -> tuple[nixl_mem_t, Any]:
    """The kind of memory, and descriptors for the constructor of a list."""
    tensors = [descs] if isinstance(descs, torch.Tensor) else descs
    if isinstance(tensors, Sequence) and tensors and isinstance(tensors[0], torch.Tensor):
        return _of_tensors(op, tensors)
    if not isinstance(descs, list | np.ndarray):
        raise nixlInvalidParamError(
            f"{op}: descs must be tensors, a list of tuples or an array, got {descs!r:.80}"
        )
    return as_mem_type(op, mem_type), descs


def _of_tensors(op: str, tensors: Sequence[torch.Tensor]) -> tuple[nixl_mem_t, np.ndarray]:
    device = tensors[0].device
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.device != device:
            raise nixlInvalidParamError(f"{op}: descs must be tensors of one device")
        if not tensor.is_contiguous():
            raise nixlInvalidParamError(
                f"{op}: descs must be packed tensors, got strides {tensor.stride()}"
            )
    rows = [(t.data_ptr(), t.nbytes, max(t.get_device(), 0)) for t in tensors]
    kind = nixl_mem_t.DRAM_SEG if device.type == "cpu" else nixl_mem_t.VRAM_SEG
    return kind, np.array(rows, np.uint64)


def _as_text(text: Any) -> bytes:
    if not isinstance(text, str | bytes):
        raise nixlInvalidParamError(f"descs must end in a text, got {text!r:.80}")
    try:
        return os.fsencode(text)  # a path may have bytes that are no text
    except UnicodeEncodeError:
        raise nixlInvalidParamError(
            f"descs must end in a text that can be encoded, got {text!r:.80}"
        ) from None


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer)
