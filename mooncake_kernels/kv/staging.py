"""A staging buffer as records: their views and their checksums."""

from typing import Protocol

import torch

from ..bad_ids import BadIds
from ..errors import InvalidArgument
from .execute import Engine, add_checksums
from .pack_header import DTYPES, PackedView, PackHeader
from .row_plan import RowPlan
from .view import KVView

WORD_BYTES, START = 8, 16  # alignment of a buffer's start, so that its elements are aligned


class Staging:
    """The records of a header in a buffer, as many as it holds.

    Attributes:
        views: one per view of the header; their blocks are the records.
    """

    def __init__(self, op: str, header: PackHeader, buffer: torch.Tensor):
        self._header = header
        self._capacity = buffer.numel() // header.record_bytes
        self._buffer = buffer[: self._capacity * header.record_bytes]
        self.views = [self._view(packed) for packed in header.views]
        self._row_plans: list[RowPlan] = []
        names = (f"{op}: staging", f"{op}: staging")
        self._bad = BadIds(buffer.device, names, (self._capacity, self._capacity))

    def checksums(self, num_blocks: int) -> torch.Tensor:
        """Return the checksums stored in the records, as a view of the buffer."""
        words_per_record = self._header.record_bytes // WORD_BYTES
        words = self._buffer.view(torch.int64).view(self._capacity, words_per_record)
        return words[:num_blocks, self._header.checksum_offset // WORD_BYTES]

    def add_up(self, num_blocks: int, max_sms: int | None, engine: Engine) -> torch.Tensor:
        """Compute the checksums of the records."""
        if not self._row_plans:
            first_words = (0, 0)
            for view in self.views:
                self._row_plans.append(
                    RowPlan(view, view, view.everything, None, None, first_words)
                )
                first_words = self._row_plans[-1].next_words
        device = self._buffer.device
        records = torch.arange(num_blocks, device=device)
        sums = torch.zeros(num_blocks, dtype=torch.int64, device=device)
        for view, plan in zip(self.views, self._row_plans, strict=True):
            add_checksums(engine, view, plan, records, sums, self._bad, max_sms)
        return sums

    def _view(self, packed: PackedView) -> KVView:
        dtype = DTYPES[packed.dtype]
        strides: list[int] = []
        step = 1
        for size in reversed(packed.shape):
            strides.insert(0, step)
            step *= size
        tensor = self._buffer.view(dtype)
        return KVView(
            tensor.as_strided(
                (self._capacity, *packed.shape),
                (self._header.record_bytes // dtype.itemsize, *strides),
                tensor.storage_offset() + packed.offset // dtype.itemsize,
            ),
            f"block {packed.axes}",
        )


class Records(Protocol):
    """What a header says of the whole buffer."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


def check_buffer(op: str, buffer: torch.Tensor, header: Records, device: torch.device) -> None:
    """Refuse a buffer that cannot hold the header's records."""
    if not isinstance(buffer, torch.Tensor) or buffer.dtype != torch.uint8 or buffer.dim() != 1:
        got = type(buffer).__name__
        if isinstance(buffer, torch.Tensor):
            got = f"{buffer.dtype} of shape {tuple(buffer.shape)}"
        raise InvalidArgument(f"{op}: staging must be a 1-d uint8 tensor, got {got}")
    if not buffer.is_contiguous() or buffer.device != device:
        raise InvalidArgument(
            f"{op}: staging must be packed and on {device}, got strides {buffer.stride()} on "
            f"{buffer.device}"
        )
    if buffer.numel() < header.num_bytes:
        raise InvalidArgument(
            f"{op}: staging must have {header.num_bytes} bytes for {header.num_blocks} blocks, got "
            f"{buffer.numel()}"
        )
    if buffer.numel() > 0 and buffer.data_ptr() == 0:
        raise InvalidArgument(f"{op}: staging must have memory, got a tensor that was freed")
    if buffer.data_ptr() % START or buffer.storage_offset() % START:
        raise InvalidArgument(
            f"{op}: staging must begin at a multiple of {START} bytes, got {buffer.data_ptr():#x}"
        )
