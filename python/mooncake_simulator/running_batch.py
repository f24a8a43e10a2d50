"""Requests that are decoded together, one token each per step, and the times of the steps."""

import heapq
from math import ceil, sqrt
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")


class RunningBatch(Generic[T]):
    """Members of the batch, by the step at which each leaves; steps pass by the thousand at once.

    A member that joins before step s and needs n tokens leaves after step s + n - 1. So work is
    only needed when a member joins or leaves, whatever the number of tokens.

    Example:
        >>> batch = RunningBatch()
        >>> batch.join("a", context_tokens=100, num_tokens=3)
        0
        >>> batch.pass_steps(batch.steps_to_next_leave, first_s=0.02, growth_s=0.001)
        ['a']
        >>> batch.gaps_s(0, 3).round(3).tolist()
        [0.02, 0.021, 0.022]
    """

    def __init__(self) -> None:
        self.step = 0
        self.kv_tokens = 0
        self.pending_stall_s = 0.0  # added to the next step
        self._leaves: list[tuple[int, int, int, T]] = []
        self._order = 0
        self._log: list[tuple[int, float, float]] = []  # steps, seconds of the first, growth
        self._gaps: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._leaves)

    def join(self, member: T, context_tokens: int, num_tokens: int) -> int:
        """Decode ``num_tokens`` tokens after ``context_tokens``; return the first step's number."""
        leave = self.step + num_tokens
        heapq.heappush(self._leaves, (leave, self._order, context_tokens + num_tokens, member))
        self._order += 1
        self.kv_tokens += context_tokens
        return self.step

    @property
    def steps_to_next_leave(self) -> int:
        """Steps until a member leaves; the batch must not be empty."""
        return self._leaves[0][0] - self.step

    def pass_steps(self, count: int, first_s: float, growth_s: float) -> list[T]:
        """Let steps pass, each ``growth_s`` longer than the one before; return the leavers."""
        if self.pending_stall_s:
            self._log.append((0, self.pending_stall_s, 0.0))
            self.pending_stall_s = 0.0
        self._log.append((count, first_s, growth_s))
        self._gaps = None
        self.step += count
        self.kv_tokens += count * len(self._leaves)
        left = []
        while self._leaves and self._leaves[0][0] <= self.step:
            _, _, tokens, member = heapq.heappop(self._leaves)
            self.kv_tokens -= tokens
            left.append(member)
        return left

    def stall(self, seconds: float) -> None:
        """Make the next step longer by this time: the engine did something else before it."""
        if self._leaves:
            self.pending_stall_s += seconds

    def clear(self) -> list[T]:
        """Remove all members; return them."""
        left = [member for *_, member in sorted(self._leaves, key=lambda leave: leave[:2])]
        self._leaves.clear()
        self.kv_tokens = 0
        self.pending_stall_s = 0.0
        return left

    def gaps_s(self, first_step: int, count: int) -> np.ndarray:
        """Seconds from token to token of a member that joined at ``first_step``."""
        if self._gaps is None:
            self._gaps = self._expand()
        return self._gaps[first_step : first_step + count]

    def _expand(self) -> np.ndarray:
        log = np.array(self._log).reshape(-1, 3)
        counts = log[:, 0].astype(np.int64)
        starts = np.cumsum(counts) - counts
        index = np.arange(counts.sum()) - np.repeat(starts, counts)
        gaps = np.repeat(log[:, 1], counts) + index * np.repeat(log[:, 2], counts)
        stalls = counts == 0
        after = starts[stalls] < len(gaps)
        np.add.at(gaps, starts[stalls][after], log[stalls, 1][after])
        return gaps


def steps_by(seconds: float, first_s: float, growth_s: float) -> int:
    """Count the steps that are over once the step in progress after ``seconds`` is.

    The lowest n with n * first_s + growth_s * n * (n - 1) / 2 >= seconds, at least 1.
    """
    if growth_s <= 0:
        steps = seconds / first_s
    else:
        half = first_s / growth_s - 0.5
        steps = sqrt(half * half + 2 * seconds / growth_s) - half
    return max(1, ceil(steps - 1e-9))


def steps_s(count: int, first_s: float, growth_s: float) -> float:
    """Total seconds of this many steps."""
    return count * first_s + growth_s * count * (count - 1) / 2
