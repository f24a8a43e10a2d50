"""Made-up traces that are like a profile: in lengths, arrivals and shared prefixes."""

import numpy as np

from .errors import InvalidTrace
from .profile import TraceProfile
from .request import TraceRequest


def synth_trace(profile: TraceProfile, num_requests: int, *, seed: int = 0) -> list[TraceRequest]:
    """Make up a trace.

    Equivalent to::

        for i in range(num_requests):
            arrive at the same moment as the last one, or after a gap, as the profile's requests do
            row = one of the profile's requests, each as often as the others
            parent = an earlier request whose blocks were last used about row.age requests ago,
                     and that has about row.parent_blocks
            hash_ids = the first row.matched_blocks of parent, then new ones

    So the lengths, how long prefixes are and how long they wait to be used again are the profile's,
    and with them what a cache of a given size hits. What is lost: how the load changes over
    minutes, and that long prompts may come together. A trace that is shorter than the ages in its
    profile reuses sooner.

    Args:
        profile: of the trace that it shall be like.
        num_requests: at least 1.
        seed: the same seed makes the same trace.

    Raises:
        InvalidTrace: ``num_requests`` is below 1.
    """
    if num_requests < 1:
        raise InvalidTrace("synth_trace", 1, f"num_requests must be at least 1, got {num_requests}")
    rng = np.random.default_rng(seed)
    times = _arrivals(profile, num_requests, rng)
    rows = _Rows(profile, rng)
    family = _Family(num_requests)
    requests = []
    for i in range(num_requests):
        input_length, output_length, matched, age, parent_blocks = rows.take(i)
        num_blocks = -(-input_length // profile.block_size)
        ids = family.add(num_blocks, min(matched, num_blocks), age, parent_blocks)
        requests.append(TraceRequest(times[i], input_length, output_length, ids))
    return requests


def _arrivals(profile: TraceProfile, num_requests: int, rng: np.random.Generator) -> list[float]:
    """Draw moments, and how many requests arrive at each; the first one is 0."""
    counts = rng.choice(profile.counts, num_requests)  # each at least 1: enough of them
    num_moments = int(np.searchsorted(np.cumsum(counts), num_requests)) + 1
    gaps = rng.choice(profile.gaps_ms, num_moments)
    moments = np.concatenate(([0.0], np.cumsum(gaps)))[:num_moments]
    return np.repeat(moments, counts[:num_moments])[:num_requests].tolist()


class _Rows:
    """A profile's rows in random order, again and again; one that is too old for now waits."""

    def __init__(self, profile: TraceProfile, rng: np.random.Generator) -> None:
        self.profile, self.rng = profile, rng
        self.waiting: list[tuple[int, int, int, int, int]] = []

    def take(self, index: int) -> tuple[int, int, int, int, int]:
        """Take a row whose prefix was used no longer ago than the trace is old."""
        for attempt in range(2):
            for place, row in enumerate(self.waiting):
                if row[3] <= index:
                    return self.waiting.pop(place)
            if attempt == 0 and len(self.waiting) < 4 * len(self.profile.rows):
                order = self.rng.permutation(len(self.profile.rows))
                self.waiting += [self.profile.rows[place] for place in order]
        return self.waiting.pop(0)


class _Family:
    """The requests so far, and who of them was the last to use which prefix."""

    def __init__(self, num_requests: int) -> None:
        self.chains: list[tuple[int, ...]] = []
        self.num_ids = 0
        self.num_blocks = np.zeros(num_requests, np.int64)
        self.reused_blocks = np.zeros(num_requests, np.int64)  # by a later request
        self.logs = np.log(np.arange(1, num_requests + 1))

    def add(self, num_blocks: int, matched: int, age: int, parent_blocks: int) -> tuple[int, ...]:
        """Add a request that shares ``matched`` blocks, and return its hash ids."""
        shared: tuple[int, ...] = ()
        parent = self._parent(matched, age, parent_blocks) if matched else None
        if parent is not None:
            shared = self.chains[parent][:matched]
            self.reused_blocks[parent] = max(self.reused_blocks[parent], len(shared))
        first = self.num_ids
        self.num_ids += num_blocks - len(shared)
        chain = (*shared, *range(first, self.num_ids))
        self.num_blocks[len(self.chains)] = num_blocks
        self.chains.append(chain)
        return chain

    def _parent(self, matched: int, age: int, parent_blocks: int) -> int | None:
        """Find who was the last to use such a prefix, nearest in age and length."""
        now = len(self.chains)
        near, everyone = slice(max(0, now - 2 * age), now - age // 2), slice(0, now)
        for where, must_be_last in ((near, True), (everyone, True), (everyone, False)):
            fits = self.num_blocks[where] >= matched
            if must_be_last:
                fits &= self.reused_blocks[where] < matched
            found = np.flatnonzero(fits) + where.start
            if len(found):
                off = np.abs(self.logs[now - found - 1] - np.log(max(age, 1)))
                off += np.abs(np.log(self.num_blocks[found] / parent_blocks))
                return int(found[np.argmin(off)])
        return int(np.argmax(self.num_blocks[:now])) if now else None
