"""Small rows of host memory that kernels write to, possibly after their owner is gone."""

import weakref
from collections import deque
from collections.abc import Callable, Iterable

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily


class SmallBufferCache:
    """Lends rows of zeros; their memory is never freed, so a late kernel writes to valid memory.

    It should not write to what is another's by then, either. The host cannot know when it has run
    without waiting, so a row that came back rests until many others have come back, too.

    Args:
        make: returns new rows, at least one.
        num_resting: how many rows rest.
    """

    def __init__(self, make: Callable[[], Iterable[torch.Tensor]], num_resting: int):
        self._make, self._num_resting = make, num_resting
        self._new: list[torch.Tensor] = []
        self._back: deque[torch.Tensor] = deque()

    def lend(self, owner: object) -> torch.Tensor:
        """Lend a row for the lifetime of the owner."""
        # A row outlives any mode of torch's. Out of inference mode its tensor could not be reset.
        with unset_fake_temporarily(), torch.inference_mode(False):
            row = self._take().zero_()
        weakref.finalize(owner, self._back.append, row).atexit = False
        return row

    def _take(self) -> torch.Tensor:
        if len(self._back) > self._num_resting:
            return self._back.popleft()
        try:
            return self._new.pop()
        except IndexError:
            row, *others = self._make()
            self._new.extend(others)
            return row
