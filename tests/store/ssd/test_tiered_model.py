"""A store with a disk, and another process's store on its pool, against a dict, in any order."""

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mooncake_kernels.pool import ObjectPool
from mooncake_serving.store import SsdTier, Store, TieredStore, lru

from ..support import EXISTS, STORED
from .support import PAGE
from .tiered import BUCKET, IN_POOL, OBJECT, POLICIES

NUM_KEYS = 12  # more than the pool has room for
MOST_PINS = 3  # so that there is room for what is put
KEYS = st.integers(0, NUM_KEYS - 1)


class TieredMachine(RuleBasedStateMachine):
    """`objects` are those that were put, and not removed since: a number each, which it contains.

    `may_be_gone` are those that the other process has evicted, perhaps before the disk had them.
    All others must be there, and none but the last put. Everything that leaves the pool otherwise
    goes to the disk, which never has to drop anything. `pins` are held meanwhile: what they read
    does not change, and stays in the pool unless it is removed.
    """

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.pool = ObjectPool.create(IN_POOL * OBJECT)
        self.others = Store(ObjectPool.open(self.pool.path), namespace="model", evict_ratio=0)
        self.objects, self.may_be_gone, self.num_puts = {}, set(), 0
        self.pins, self.policy = {}, lru

    @property
    def path(self) -> Path:
        return Path(self.folder.name) / "tier"

    def open(self) -> None:
        tier = SsdTier(self.path, 16 * BUCKET, bucket_bytes=BUCKET, slot_bytes=4 * PAGE)
        pool = ObjectPool.open(self.pool.path)
        options = {"namespace": "model", "evict_ratio": 0, "eviction": self.policy}
        self.store = TieredStore(pool, tier, min_uses=1, **options)
        self.store._demoter.flush()

    @initialize(policy=st.sampled_from(POLICIES))
    def begin(self, policy):
        self.policy = policy
        self.open()

    def settle(self, key: int) -> None:
        """Find out whether an object that may be gone is."""
        if key in self.may_be_gone and not self.store.exists(key):
            del self.objects[key]
        self.may_be_gone.discard(key)

    def bytes_of(self, number: int) -> bytes:
        return number.to_bytes(8, "little") * (OBJECT // 8)

    @rule(key=KEYS)
    def put(self, key):
        self.settle(key)
        self.num_puts += 1
        result = self.store.put(key, self.bytes_of(self.num_puts))
        if key in self.objects:
            assert result is EXISTS
        else:
            assert result is STORED
            self.objects[key] = self.num_puts

    @rule(key=KEYS)
    def put_by_other(self, key):
        """What the disk has, it does not see: so it puts the same."""
        self.settle(key)
        number = self.objects.get(key, self.num_puts + 1)
        stats = self.pool.stats()
        if stats.free_bytes >= OBJECT:
            self.num_puts += 1
            assert self.others.put(key, self.bytes_of(number)) in (STORED, EXISTS)
            self.objects[key] = number

    @rule(key=KEYS)
    def read(self, key):
        found = self.store.get(key)
        if found is None:
            assert key not in self.objects or key in self.may_be_gone
            self.objects.pop(key, None)
        else:
            assert found == self.bytes_of(self.objects[key])
        self.may_be_gone.discard(key)

    @rule(key=KEYS)
    def remove(self, key):
        self.settle(key)
        assert self.store.remove(key) == (key in self.objects)
        self.objects.pop(key, None)

    @rule(key=KEYS)
    def remove_by_other(self, key):
        was_in_pool = self.pool.contains(self.others.keyspace.key(key))
        was_removed = self.others.remove(key)
        assert was_in_pool or not was_removed  # it may have left for the disk in between
        self.objects.pop(key, None)
        self.may_be_gone.discard(key)

    @rule(is_other=st.booleans())
    def remove_all(self, is_other):
        (self.others if is_other else self.store).remove_all()
        self.objects.clear()
        self.may_be_gone.clear()

    @rule(num_objects=st.integers(1, IN_POOL))
    def evict(self, num_objects):
        self.store.evict(num_objects * OBJECT)

    @rule(num_objects=st.integers(1, IN_POOL))
    def evict_by_other(self, num_objects):
        gone = {tuple(key) for key in self.others.evict(num_objects * OBJECT).keys.tolist()}
        names = {self.others.keyspace.key(key): key for key in range(NUM_KEYS)}
        self.may_be_gone |= {names[key] for key in gone} & self.objects.keys()

    @rule(key=KEYS)
    def pin(self, key):
        if len(self.pins) == MOST_PINS or key in self.pins:
            return
        self.settle(key)
        pinned = self.store.view(key)
        assert (pinned is not None) == (key in self.objects)
        if pinned is not None:
            self.pins[key] = (pinned, self.objects[key])

    @rule(key=KEYS)
    def unpin(self, key):
        if key in self.pins:
            self.pins.pop(key)[0].close()

    @rule()
    def flush(self):
        assert self.store.flush()

    @rule(closes=st.booleans())
    def restart(self, closes):
        """After a death the pool and the disk are as they were."""
        self.unpin_all()
        if closes:
            self.store.close()
        else:
            self.store._demoter.close(0)
            image = self.path.read_bytes()
            self.store.close()
            self.path.write_bytes(image)
        self.open()

    @invariant()
    def agrees(self):
        found = self.store.exists_each(range(NUM_KEYS))
        there = set(np.flatnonzero(found).tolist())
        assert there <= self.objects.keys()
        assert self.objects.keys() - there <= self.may_be_gone
        for key, (pinned, number) in self.pins.items():
            assert pinned.view == self.bytes_of(number)
            if self.objects.get(key) == number:
                assert self.pool.contains(self.store.keyspace.key(key))

    def unpin_all(self):
        while self.pins:
            self.pins.popitem()[1][0].close()

    def teardown(self):
        self.unpin_all()
        self.store.close()
        self.others.close()
        self.pool.close()
        self.folder.cleanup()


TieredMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestTieredModel = TieredMachine.TestCase
