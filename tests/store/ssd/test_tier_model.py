"""A tier against a dict, over laps, restarts and deaths in any order."""

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mooncake_kernels.pool import PutResult

from .support import BUCKET, LARGE, keys_of, open_tier, put, read, size_of

KEYS = st.tuples(st.integers(0, 40), st.integers(0, 1))
SIZE = 4


class TierMachine(RuleBasedStateMachine):
    """`stored` are the keys that may be there: all that were put, and not removed since.

    A tier drops what it has no room for. So a key that is not stored must not be there, and one
    that is there must be stored; what was dropped is told by the tier's own count.
    """

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "tier"
        self.tier = open_tier(self.path, SIZE)
        self.stored, self.num_dropped = set(), 0
        self.watch, self.watched = self.tier.watch(), set()

    @rule(keys=st.lists(KEYS, max_size=5, unique=True))  # which fit three buckets
    def put(self, keys):
        results = put(self.tier, *keys)
        for key, result in zip(keys, results, strict=True):
            if result is PutResult.EXISTS:
                assert key in self.stored
            else:  # new, or dropped by what came before it in this call
                assert result is PutResult.STORED
        self.stored |= set(keys)
        self.settle()
        assert {k for k, r in zip(keys, results, strict=True) if r is r.STORED} <= self.stored

    @rule(key=st.integers(0, 12))
    def put_large(self, key):
        self.put([(key, LARGE)])

    @rule(keys=st.lists(KEYS | st.tuples(st.integers(0, 12), st.just(LARGE)), max_size=8))
    def read(self, keys):
        assert read(self.tier, *keys) == set(keys) & self.stored

    @rule()
    def read_all(self):
        """Which makes the tier move as much as it may."""
        assert read(self.tier, *self.stored) == self.stored

    @rule(key=KEYS)
    def remove(self, key):
        assert self.tier.remove(key) == (key in self.stored)
        self.stored.discard(key)
        self.settle()

    @rule()
    def remove_all(self):
        assert self.tier.remove_all() == len(self.stored)
        self.stored.clear()

    @rule(closes=st.booleans())
    def restart(self, closes):
        """After a death all is there that was there, for the page cache outlives it."""
        image = self.path.read_bytes()
        self.tier.close()
        if not closes:
            self.path.write_bytes(image)
        self.tier, self.num_dropped = open_tier(self.path, SIZE), 0
        self.watch, self.watched = self.tier.watch(), set()

    @rule()
    def look(self):
        """What has changed since the last look leads from what was there to what is there."""
        changes = self.watch.look()
        removed, stored = (set(map(tuple, keys.tolist())) for keys in vars(changes).values())
        assert removed <= self.watched and not stored & self.watched
        self.watched = self.watched - removed | stored
        assert self.watched == self.stored

    @invariant()
    def agrees(self):
        stats = self.tier.stats()
        assert keys_of(self.tier) == self.stored
        assert stats.num_objects == len(self.stored)
        assert stats.live_bytes == sum(map(size_of, self.stored))
        assert stats.num_damaged == stats.num_write_errors == 0
        assert all(bucket.end <= bucket.offset + BUCKET for bucket in self.tier._buckets)
        assert stats.num_free_buckets >= 1 or stats.num_buckets_begun < SIZE

    def settle(self):
        """Take out what was dropped, of which there is as much as the tier says."""
        there = keys_of(self.tier)
        assert there <= self.stored
        dropped = self.tier.stats().num_dropped - self.num_dropped
        assert len(self.stored - there) <= dropped
        self.stored, self.num_dropped = there, self.num_dropped + dropped

    def teardown(self):
        self.tier.close()
        self.folder.cleanup()


TierMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestTierModel = TierMachine.TestCase
