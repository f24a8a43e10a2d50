"""Flags in host memory by which one side shows its progress to another; csrc/kv/ready_flags.h."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .. import _library
from ..errors import InvalidArgument
from ..small_buffer_cache import SmallBufferCache

TIMED_OUT, ABORTED = 1, 2
_LINE_WORDS = 8  # of a cache line
_NUM_ROWS = 16  # allocated at once
_REPORT_WORDS = 4  # before the flags; WaitReport in ready_flags.h
_READY, _GIVEN_UP = 0, 2  # what poll_flag returns
_SLICE_S = 0.1  # between two checks for Python's signals
_NUM_RESTING = 1 << 10  # of a size, once as many streams were dropped
_RESTING_BYTES = 1 << 20  # fewer rest if they are long
_lenders: dict[tuple[int, bool], SmallBufferCache] = {}


class Report(NamedTuple):
    """The report of the first wait that failed."""

    state: int
    flag: int  # its index
    wanted: int
    seen: int


class Flags:
    """int64 flags, initially 0, and the report of their waiters.

    Their memory is lent, and lent again much later: a kernel or a graph that outlives its owner
    reads valid memory, and does not set the flags of another.

    Args:
        count: how many.
        pinned: whether CUDA can access them.
    """

    def __init__(self, count: int, *, pinned: bool):
        num_words = _REPORT_WORDS + count
        # A power of two, so that few sizes of row are kept for good, however many of streams.
        row_words = max(_LINE_WORDS, 1 << (num_words - 1).bit_length())

        def make() -> Sequence[torch.Tensor]:
            # Many at once, for page-locking takes long; each in cache lines of its own.
            shape = (_NUM_ROWS, row_words)
            rows = torch.zeros(shape, dtype=torch.int64, device="cpu", pin_memory=pinned)
            return rows.unbind()

        num_resting = min(_NUM_RESTING, max(_NUM_ROWS, _RESTING_BYTES // (8 * row_words)))
        lender = SmallBufferCache(make, num_resting)
        row = _lenders.setdefault((row_words, pinned), lender).lend(self)
        self._report, self.values = row[:_REPORT_WORDS], row[_REPORT_WORDS:num_words]
        self.report_address, self._address = self._report.data_ptr(), self.values.data_ptr()

    def address(self, index: int) -> int:
        return self._address + 8 * index

    def set(self, index: int, value: int) -> None:
        _library.signal_flag(None, [_any_host_tensor], self.address(index), value)

    def has(self, index: int, value: int) -> bool:
        return _library.poll_flag(self.address(index), value, 0, 0) == _READY

    def wait(self, index: int, value: int, timeout_s: float) -> bool:
        """Wait in the calling thread; return whether it came in time, and before a report."""
        end = time.monotonic() + timeout_s
        while True:
            left = end - time.monotonic()
            part_ns = int(max(min(left, _SLICE_S), 0) * 1e9)
            result = _library.poll_flag(self.address(index), value, self.report_address, part_ns)
            if result == _READY:
                return True
            if left <= _SLICE_S or (result == _GIVEN_UP and self.report()):
                return False

    def report(self) -> Report | None:
        if int(self._report[0]) <= 0:  # none, or being written
            return None
        state, address, wanted, seen = self._report.tolist()
        return Report(state, (address - self._address) // 8, wanted, seen)

    def abort(self) -> None:
        self._report[0].fill_(ABORTED)

    def clear(self, value: int) -> None:
        self.values.fill_(value)
        self._report.zero_()


def signal_flag(flags: torch.Tensor, index: int, value: int, written: torch.Tensor) -> None:
    """Store ``value`` into ``flags[index]`` once ``written`` is written.

    Equivalent to ``flags[index] = value``, queued on the current stream of ``written``'s device
    after earlier work; on the CPU at once. A reader that sees the value (with an acquire load, as
    in ``poll_flag``) sees what was written before it.

    Args:
        flags: int64, packed. In host memory, pinned if ``written`` is on CUDA; or on its device.
        index: of the flag.
        value: the value to store; a CUDA graph stores the same at each replay.
        written: any tensor that the flag is about. In compiled code the signal stays after the
            code that writes it.

    Raises:
        InvalidArgument: an argument is not as above.
    """
    if flags.dtype != torch.int64 or not flags.is_contiguous():
        raise InvalidArgument(
            f"signal_flag: flags must be packed int64, got {flags.dtype}, strides {flags.stride()}"
        )
    if not 0 <= index < flags.numel():
        raise InvalidArgument(f"signal_flag: index must be in [0, {flags.numel()}), got {index}")
    on_host = flags.device.type == "cpu"
    if (on_host and written.is_cuda and not flags.is_pinned()) or (
        not on_host and flags.device != written.device
    ):
        raise InvalidArgument(
            f"signal_flag: flags must be in memory that {written.device} reaches (its own, or "
            f"host memory, which CUDA wants pinned), got {flags.device}"
        )
    _library.call(_library.signal_flag, None, [written], flags.data_ptr() + 8 * index, value)


_any_host_tensor = torch.empty(0, device="cpu")  # tells an operator where to run
