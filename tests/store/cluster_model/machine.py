"""A cluster of hosts against a dict, under every operation in any order.

Each host has a pool, and the oracle knows the contents of each: it learns of every eviction, and
predicts everything else. So every host must find an object that was acknowledged, was not evicted
and is in a reachable pool, with the bytes that follow from its key.
"""

import hashlib
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mooncake_kernels.errors import Unavailable
from mooncake_kernels.pool import Evicted, ObjectPool, object_keys
from mooncake_serving.store import Store, lru
from mooncake_serving.store.replication.draining import drain
from mooncake_serving.store.replication.replicator import Replicator

from ..cluster.support import Host, make_host
from ..replication.support import die
from ..support import EXISTS, FULL, STORED, eventually

UNIT, UNITS, NUM_KEYS = 4096, 12, 12
POOLS = 3
KEYS = st.integers(0, NUM_KEYS - 1)
SOME_KEYS = st.lists(KEYS, min_size=1, max_size=6, unique=True)
WORDS = object_keys(np.arange(NUM_KEYS), "")
INDEX = {tuple(words): i for i, words in enumerate(WORDS.tolist())}
LONG_S = 600.0  # no one's time runs out but when a rule says so


def content(key: int) -> bytes:
    """The bytes of an object: up to 4 units of them, or none."""
    num_bytes = (key * 7919) % (4 * UNIT) if key else 0
    return hashlib.shake_128(str(key).encode()).digest(num_bytes)


@dataclass
class Slot:
    """A machine: its pool outlives the processes that serve it, unless it is lost.

    Attributes:
        objects: the contents of the pool.
        host: the process; None: there is none.
        dead: processes that the directory still considers alive.
        evicted: objects evicted since this was last looked at.
    """

    number: int
    pool: ObjectPool
    objects: set[int] = field(default_factory=set)
    host: Host | None = None
    dead: list[Host] = field(default_factory=list)
    evicted: set[int] = field(default_factory=set)

    def evict(self, pool: ObjectPool, num_bytes: int) -> Evicted:
        gone = lru(pool, num_bytes)
        self.evicted |= {INDEX[tuple(key)] for key in gone.keys.tolist()}
        return gone

    def actual(self) -> set[int]:
        return {INDEX[tuple(key)] for key in self.pool.objects().keys.tolist()}


class ClusterMachine(RuleBasedStateMachine):
    """Hosts 0 to 2 have pools; the last one, which is always there, has none."""

    def __init__(self, make_world):
        super().__init__()
        self.world = make_world()
        self.directory = self.world.directory
        self.slots = [Slot(i, new_pool()) for i in range(POOLS)]
        self.none = make_host(self.directory, "none", 0, ttl_s=LONG_S)

    @initialize()
    def begin(self):
        for slot in self.slots:
            self.start(slot)

    def start(self, slot: Slot) -> None:
        store = Store(slot.pool, eviction=slot.evict, evict_ratio=0.0)
        slot.host = make_host(
            self.directory,
            f"host-{slot.number}",
            store=store,
            ttl_s=LONG_S,
            answer_s=5.0,
            read_s=5.0,
        )
        self.beat()

    def beat(self) -> None:
        """What every host does periodically: see which members are alive, and forget the others."""
        for host in self.hosts():
            host.node.membership._renew_once()
            host.node.membership._look_once(0)  # with all that is not done each time

    # What is known beforehand.

    def up(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.host is not None]

    def hosts(self) -> list[Host]:
        return [slot.host for slot in self.up()] + [self.none]

    def reachable(self) -> set[int]:
        """Objects that every host must find."""
        return set().union(*(slot.objects for slot in self.up()))

    def listed(self, key: int, but: str = "") -> bool:
        """Whether the directory lists a holder, dead ones included, other than one pool."""
        return bool(set(self.directory.holders(WORDS[[key]])[0]) - {but})

    def settle(self, *allowed: int) -> None:
        """After an operation: pools have what they had, less what was evicted, and copies of
        nothing but ``allowed`` objects.
        """
        # A reader has its bytes before their holder lets go of them, which keeps what comes next
        # from evicting them.
        pools = [slot.pool for slot in self.slots]
        eventually(lambda: not any(pool.stats().num_pins for pool in pools))
        for slot in self.slots:
            actual = slot.actual()
            assert slot.objects - actual <= slot.evicted, "an object was lost"
            assert actual - slot.objects <= set(allowed), "an object that nobody wanted came"
            slot.objects = actual
            slot.evicted.clear()

    def some_host(self, data) -> Host:
        return data.draw(st.sampled_from(self.hosts()))

    def some_slot(self, data) -> Slot:
        return self.slots[data.draw(st.sampled_from([slot.number for slot in self.up()]))]

    # Writing.

    @rule(data=st.data(), keys=SOME_KEYS)
    def put(self, data, keys):
        host = self.some_host(data)
        slot = next((slot for slot in self.up() if slot.host is host), None)
        here = set() if slot is None else set(slot.objects)
        own = host.node.pool_name  # which knows better what it has than the directory
        listed = {key for key in keys if self.listed(key, own)}
        try:
            results = host.cluster.put_each(keys, [content(key) for key in keys])
        except Unavailable:
            assert slot is None and not self.up() and not set(keys) <= listed
            return
        pools = [slot] if slot is not None else self.up()
        for key, result in zip(keys, results, strict=True):
            expected = EXISTS if key in listed or key in here else STORED
            # What is read at once cannot be evicted before all of it is there.
            assert result is expected or (result is FULL and slot is None and len(keys) > 1)
            if result is STORED:
                assert any(key in pool.actual() | pool.evicted for pool in pools)
        self.settle(*keys)

    @rule(data=st.data(), key=KEYS, replicas=st.integers(1, 4))
    @precondition(lambda self: self.up())
    def put_copies(self, data, key, replicas):
        host = self.some_host(data)
        result, num_copies = Replicator(host.cluster).put(key, content(key), replicas=replicas)
        self.settle(key)
        self.check_copies(key, num_copies, replicas)
        assert result in (STORED, EXISTS)

    @rule(data=st.data(), keys=SOME_KEYS, num_copies=st.integers(1, 3))
    def replicate(self, data, keys, num_copies):
        copied = Replicator(self.some_host(data).cluster).replicate(keys, num_copies)
        self.settle(*keys)
        for i in range(len(keys)):
            if i not in copied.failed:
                assert copied.num_copies[i] >= num_copies
        if not self.someone_is_missed():
            for key, copies in zip(keys, copied.num_copies.tolist(), strict=True):
                self.check_copies(key, copies, num_copies)

    def check_copies(self, key: int, num_copies: int, wanted: int) -> None:
        """As many as requested, unless one was evicted for another or its host is dead."""
        has_it = sum(key in slot.objects for slot in self.up())
        if not self.someone_is_missed() and has_it:
            assert num_copies >= min(wanted, has_it)
            assert num_copies <= len(self.up())

    def someone_is_missed(self) -> bool:
        return any(slot.dead for slot in self.slots)

    @rule(data=st.data(), key=KEYS)
    def remove(self, data, key):
        host = self.some_host(data)
        was_somewhere = key in self.reachable()
        try:
            assert host.cluster.remove(key) == was_somewhere
        except Unavailable:
            assert self.someone_is_missed()
        for slot in self.up():
            slot.objects.discard(key)
        self.settle()

    @rule(data=st.data(), num_bytes=st.integers(1, UNITS * UNIT))
    @precondition(lambda self: self.up())
    def evict(self, data, num_bytes):
        self.some_slot(data).host.store.evict(num_bytes)
        self.settle()

    @rule(data=st.data(), key=KEYS)
    @precondition(lambda self: self.up())
    def lose_silently(self, data, key):
        """As by another process that serves the pool without a node: the directory is wrong."""
        slot = self.some_slot(data)
        slot.pool.remove(tuple(WORDS[key].tolist()))
        slot.objects.discard(key)

    # Reading.

    @rule(data=st.data(), keys=SOME_KEYS)
    def read_each(self, data, keys):
        expected = [content(key) if key in self.reachable() else None for key in keys]
        assert self.some_host(data).cluster.get_each(keys) == expected
        self.settle()

    @rule(data=st.data(), keys=SOME_KEYS, room=st.integers(0, 4))
    def read_into(self, data, keys, room):
        buffers = np.zeros((len(keys), room * UNIT), np.uint8)
        sizes = self.some_host(data).cluster.get_into_each(keys, list(buffers)).tolist()
        for key, size, buffer in zip(keys, sizes, buffers, strict=True):
            expected = content(key)
            if key not in self.reachable():
                assert size == -1
            elif len(expected) > room * UNIT:
                assert size == -2
            else:
                assert size == len(expected) and buffer[:size].tobytes() == expected
        self.settle()

    @rule(data=st.data(), keys=SOME_KEYS)
    @precondition(lambda self: self.up())
    def fetch(self, data, keys):
        slot = self.some_slot(data)
        expected = [
            EXISTS if key in slot.objects else STORED if key in self.reachable() else None
            for key in keys
        ]
        results = slot.host.cluster.fetch(keys)
        for result, one in zip(results, expected, strict=True):
            assert result is one or (one is STORED and result is FULL and len(keys) > 1)
        self.settle(*keys)

    @rule(data=st.data(), key=KEYS)
    @precondition(lambda self: self.up())
    def view(self, data, key):
        pinned = self.some_slot(data).host.cluster.view(key)
        assert (pinned is not None) == (key in self.reachable())
        if pinned is not None:
            with pinned:
                assert bytes(pinned.view) == content(key)
        self.settle(key)

    @rule(data=st.data())
    def ask(self, data):
        host = self.some_host(data)
        own = next((slot.objects for slot in self.up() if slot.host is host), set())
        said = [self.listed(key) or key in own for key in range(NUM_KEYS)]
        assert host.cluster.exists_each(range(NUM_KEYS)).tolist() == said
        prefix = said.index(False) if False in said else NUM_KEYS
        assert host.cluster.match_prefix(range(NUM_KEYS)) == prefix

    # Coming and going.

    @rule(data=st.data())
    @precondition(lambda self: self.up())
    def kill(self, data):
        slot = self.some_slot(data)
        die(slot.host)
        slot.dead.append(slot.host)
        slot.host = None

    @rule()
    def forget(self):
        """The memberships of all dead hosts expire."""
        for slot in self.slots:
            while slot.dead:
                slot.dead.pop().node.close()
        self.beat()

    @rule(data=st.data(), is_lost=st.booleans())
    @precondition(lambda self: len(self.up()) < POOLS)
    def come_back(self, data, is_lost):
        """A process serves what is in the pool, or after a restart of the machine a new pool."""
        down = [slot.number for slot in self.slots if slot.host is None]
        slot = self.slots[data.draw(st.sampled_from(down))]
        if is_lost and not slot.dead:
            slot.pool.close()
            slot.pool, slot.objects = new_pool(), set()
        self.start(slot)

    @rule(data=st.data())
    @precondition(lambda self: len(self.up()) > 1 and not self.someone_is_missed())
    def drain(self, data):
        slot = self.some_slot(data)
        had, node = set(slot.objects), slot.host.node
        drained = drain(node)
        assert drained.has_left and drained.num_moved == len(had) and not slot.actual()
        evicted = set().union(*(other.evicted for other in self.up()))
        slot.host.engine.close()
        slot.host, slot.objects = None, set()
        self.settle(*had)
        assert had - evicted <= self.reachable()

    @rule(data=st.data(), num_copies=st.integers(1, 3))
    def repair(self, data, num_copies):
        Replicator(self.some_host(data).cluster).repair(num_copies)
        self.settle(*self.reachable())

    @invariant()
    def everybody_can_find_what_there_is(self):
        """The directory lists everything in pools that are served."""
        for slot in self.up():
            listed = self.directory.holders(WORDS[sorted(slot.objects)])
            assert all(slot.host.node.pool_name in names for names in listed)

    def teardown(self):
        for host in [self.none, *(h for s in self.slots for h in [*s.dead, s.host] if h)]:
            host.node.close()
            host.engine.close()
        for slot in self.slots:
            slot.pool.close()


def new_pool() -> ObjectPool:
    return ObjectPool.create(UNITS * UNIT, num_objects=64)
