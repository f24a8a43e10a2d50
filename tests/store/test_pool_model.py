"""A pool against a dict, under every operation in any order."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mooncake_kernels.pool import ObjectPool, PutResult

from .support import content

UNITS = 24
ALIGNMENT = 64
KEYS = st.tuples(st.integers(0, 5), st.integers(0, 1))
SIZES = st.integers(0, 10 * ALIGNMENT)
RETENTIONS = st.sampled_from(["normal", "soft", "hard"])


def units(num_bytes: int) -> int:
    return max(1, -(-num_bytes // ALIGNMENT))


class PoolMachine(RuleBasedStateMachine):
    """`objects` maps keys to [size, time of last use, retention]; the pool is opened twice."""

    def __init__(self):
        super().__init__()
        self.pool = ObjectPool.create(
            UNITS * ALIGNMENT, alignment=ALIGNMENT, num_objects=8, num_processes=2, num_pins=4
        )
        self.other = ObjectPool.open(self.pool.path)
        self.objects, self.puts, self.pins = {}, {}, []
        self.time = 0

    def used(self, key) -> None:
        self.time += 1
        self.objects[key][1] = self.time

    def store(self, key, num_bytes, retention) -> None:
        self.objects[key] = [num_bytes, 0, retention]
        self.used(key)

    def expected_refusal(self, key) -> PutResult | None:
        if key in self.objects:
            return PutResult.EXISTS
        return PutResult.BEING_WRITTEN if key in self.puts else None

    def check_full(self, num_bytes) -> None:
        stats = self.pool.stats()
        entries = stats.num_ready + stats.num_writing + stats.num_doomed
        assert entries == 8 or stats.largest_free_bytes < units(num_bytes) * ALIGNMENT

    @rule(key=KEYS, num_bytes=SIZES, retention=RETENTIONS)
    def put(self, key, num_bytes, retention):
        expected = self.expected_refusal(key)
        got = self.pool.put_from(key, content(key, num_bytes), retention=retention)
        if expected is None and got is PutResult.FULL:
            self.check_full(num_bytes)
        else:
            assert got is (expected or PutResult.STORED)
            if got is PutResult.STORED:
                self.store(key, num_bytes, retention)

    @rule(key=KEYS, num_bytes=SIZES)
    def begin(self, key, num_bytes):
        expected = self.expected_refusal(key)
        got = self.other.begin(key, num_bytes)
        if isinstance(got, PutResult):
            assert got is (expected or PutResult.FULL)
            if got is PutResult.FULL:
                self.check_full(num_bytes)
        else:
            assert expected is None
            self.puts[key] = got

    @precondition(lambda self: self.puts)
    @rule(data=st.data(), commits=st.booleans())
    def end(self, data, commits):
        key = data.draw(st.sampled_from(sorted(self.puts)))
        put = self.puts.pop(key)
        if not commits:
            put.abort()
            return
        put.view[:] = content(key, put.num_bytes)
        put.commit()
        self.store(key, put.num_bytes, "normal")

    @rule(key=KEYS)
    def read(self, key):
        out = np.zeros(10 * ALIGNMENT, np.uint8)
        size = self.other.get_into(key, out, verify=True)
        if key not in self.objects:
            assert size is None
            return
        assert size == self.objects[key][0]
        np.testing.assert_array_equal(out[:size], content(key, size))
        self.used(key)

    @precondition(lambda self: len(self.pins) < 4)
    @rule(key=KEYS)
    def pin(self, key):
        pinned = self.pool.pin(key)
        assert (pinned is None) == (key not in self.objects)
        if pinned is not None:
            self.used(key)
            self.pins.append((key, self.objects[key], pinned))

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data):
        key, _, pinned = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        assert bytes(pinned.view) == content(key, pinned.num_bytes).tobytes()
        pinned.close()

    @rule(key=KEYS)
    def remove(self, key):
        assert self.other.remove(key) == (key in self.objects)
        self.objects.pop(key, None)

    @rule(key=KEYS, retention=RETENTIONS)
    def retain(self, key, retention):
        assert self.pool.retain(key, retention) == (key in self.objects)
        if key in self.objects:
            self.objects[key][2] = retention

    @rule(num_units=st.integers(0, UNITS))
    def evict_lru(self, num_units):
        """The oracle: in order of use, "soft" last, neither "hard" nor what is read."""
        self.pool.stats()  # frees what was doomed and is not read any more
        read = {id(entry) for _, entry, _ in self.pins}
        candidates = [
            (entry[2] == "soft", entry[1], key)
            for key, entry in self.objects.items()
            if entry[2] != "hard" and id(entry) not in read
        ]
        expected, freed = [], 0
        for _, _, key in sorted(candidates):
            if freed >= num_units:
                break
            freed += units(self.objects[key][0])
            expected.append(key)
        evicted = self.pool.evict(num_units * ALIGNMENT)
        assert [tuple(key) for key in evicted.keys.tolist()] == expected
        assert evicted.num_bytes == freed * ALIGNMENT
        for key in expected:
            del self.objects[key]

    @rule(keys=st.lists(KEYS, max_size=4, unique=True))
    def evict_keys(self, keys):
        read = {id(entry) for _, entry, _ in self.pins}
        expected = [
            key
            for key in keys
            if key in self.objects
            and self.objects[key][2] != "hard"
            and id(self.objects[key]) not in read
        ]
        evicted = self.other.evict_keys(keys)
        assert [tuple(key) for key in evicted.keys.tolist()] == expected
        for key in expected:
            del self.objects[key]

    @invariant()
    def agrees(self):
        stats = self.other.stats()
        doomed = {
            id(entry): entry[0] for key, entry, _ in self.pins if not self.is_current(key, entry)
        }
        sizes = [entry[0] for entry in self.objects.values()] + list(doomed.values())
        sizes += [put.num_bytes for put in self.puts.values()]
        assert stats.free_bytes == (UNITS - sum(map(units, sizes))) * ALIGNMENT
        assert stats.num_ready == len(self.objects) and stats.num_writing == len(self.puts)
        assert stats.num_doomed == len(doomed) and stats.num_pins == len(self.pins)
        keys = [(i, j) for i in range(6) for j in range(2)]
        np.testing.assert_array_equal(
            self.pool.contains_each(keys), [key in self.objects for key in keys]
        )
        assert sorted(map(tuple, self.pool.objects().keys.tolist())) == sorted(self.objects)

    def is_current(self, key, entry) -> bool:
        return self.objects.get(key) is entry

    def teardown(self):
        self.puts, self.pins = {}, []
        self.other.close()
        self.pool.close()


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestPoolModel = PoolMachine.TestCase
