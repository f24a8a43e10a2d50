"""The policies against straightforward simulations, and what is never evicted."""

import contextlib
import random
from collections import OrderedDict

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPool, PutResult

from .support import check, put


def accesses(count: int) -> list[int]:
    """Skewed, with a working set that drifts: hits and misses of both policies differ."""
    rng = np.random.default_rng(3)
    return ((rng.zipf(1.3, count) + np.arange(count) // 50) % 200).tolist()


class Lru(OrderedDict):
    def hit(self, key):
        self.move_to_end(key)

    def victim(self):
        return self.popitem(last=False)[0]


class Sieve(OrderedDict):
    """Values are the marks, old keys first; the hand is a key."""

    hand = None

    def order(self, wanted):
        """Exchange the places of these keys; the hand stays where it is."""
        keys = list(self)
        at = keys.index(self.hand) if self.hand in self else None
        wanted = [key for key in dict.fromkeys(wanted) if key in self]
        for place, key in zip(sorted(map(keys.index, wanted)), wanted, strict=True):
            keys[place] = key
        self.hand = None if at is None else keys[at]
        for key in keys:
            self.move_to_end(key)

    def hit(self, key):
        self[key] = True

    def victim(self):
        keys = list(self)
        at = keys.index(self.hand) if self.hand in self else 0
        while self[keys[at]]:
            self[keys[at]] = False
            at = (at + 1) % len(keys)
        self.hand = keys[at + 1] if at + 1 < len(keys) else None
        del self[keys[at]]
        return keys[at]


@pytest.mark.parametrize("policy, simulation", [("lru", Lru), ("sieve", Sieve)])
def test_policies_match_their_simulations(policy, simulation):
    capacity, expected, hits = 40, simulation(), 0
    with ObjectPool.create(capacity * 64, alignment=64, num_objects=50) as pool:
        for key in accesses(4000):
            pinned = pool.pin((key, 0))
            assert (pinned is not None) == (key in expected)
            if pinned is not None:
                pinned.close()
                expected.hit(key)
                hits += 1
                continue
            if len(expected) == capacity:
                assert pool.evict(64, policy).keys.tolist() == [[expected.victim(), 0]]
            assert put(pool, (key, 0), 50) is PutResult.STORED
            expected[key] = False
    assert 1000 < hits < 3500


def test_reordered_and_retained_objects_keep_their_sieve_state():
    capacity, expected, rng = 40, Sieve(), np.random.default_rng(5)
    with ObjectPool.create(capacity * 64, alignment=64, num_objects=50) as pool:
        for i, key in enumerate(accesses(3000)):
            if i % 7 == 0:
                keys = rng.integers(0, 200, 100).tolist()
                pool.order_uses([(k, 0) for k in keys])
                expected.order(keys)
            if i % 5 == 0:
                soft = (int(rng.integers(0, 200)), 0)
                assert pool.retain(soft, "soft") == pool.retain(soft, "normal")
            if key in expected:
                pool.pin((key, 0)).close()
                expected.hit(key)
                continue
            if len(expected) == capacity:
                assert pool.evict(64, "sieve").keys.tolist() == [[expected.victim(), 0]]
            put(pool, (key, 0), 50)
            expected[key] = False


def test_order_uses_does_not_change_sieve_order():
    with ObjectPool.create(200 * 64, alignment=64, num_objects=200) as pool:
        for i in range(200):
            put(pool, (i, 0), 50)
        pool.order_uses([(i, 0) for i in (1, 199, 0, 198)])
        assert pool.evict(64, "lru").keys.tolist() == [[1, 0]]
        order = pool.evict(1 << 40, "sieve").keys[:, 0].tolist()
        assert order == [0, *range(2, 198), 199, 198]


@pytest.mark.parametrize("policy", ["lru", "sieve"])
def test_victims_are_what_evict_would_remove(policy):
    """Two pools of one history: one tells its victims, which then go, the other evicts."""
    rng = np.random.default_rng(11)
    with (
        ObjectPool.create(40 * 64, alignment=64, num_objects=50) as pool,
        ObjectPool.create(40 * 64, alignment=64, num_objects=50) as twin,
    ):
        for key in accesses(2000):
            if pool.contains((key, 0)):
                pool.pin((key, 0)).close()
                twin.pin((key, 0)).close()
                continue
            if pool.stats().free_bytes < 64:
                wanted = 64 * int(rng.integers(1, 6))
                victims = pool.victims(wanted, policy)
                assert pool.stats().free_bytes == 0 and pool.contains_each(victims.keys).all()
                evicted = twin.evict(wanted, policy)
                assert victims.keys.tolist() == evicted.keys.tolist()
                assert pool.evict_keys(victims.keys, victims.ids).num_bytes == wanted
            for each in (pool, twin):
                put(each, (key, 0), 50, retention="soft" if key % 9 == 0 else "normal")
        assert check(pool) == check(twin)


@pytest.mark.parametrize("policy", ["lru", "sieve"])
@pytest.mark.parametrize("seed", range(20))
def test_victims_among_soft_hard_and_pinned_objects(policy, seed):
    rng = random.Random(seed)
    with (
        ObjectPool.create(64 * 4096, num_objects=64) as pool,
        ObjectPool.create(64 * 4096, num_objects=64) as twin,
        contextlib.ExitStack() as pins,
    ):
        for key in range(rng.randrange(2, 40)):
            retention = rng.choice(["normal"] * 3 + ["soft"] * 2 + ["hard"])
            used, is_pinned = rng.randrange(key + 1), rng.random() < 0.1
            for each in (pool, twin):
                put(each, (key, 0), 4096, retention=retention)
                each.pin((used, 0)).close()
                if is_pinned:
                    pins.enter_context(each.pin((key, 0), touch=False))
        for wanted in (4096, 5 * 4096, 1 << 40):
            victims, evicted = pool.victims(wanted, policy), twin.evict(wanted, policy)
            assert victims.keys.tolist() == evicted.keys.tolist()
            assert pool.evict_keys(victims.keys, victims.ids).num_bytes == evicted.num_bytes


@pytest.mark.parametrize("policy", ["lru", "sieve"])
def test_victims_are_distinct_and_exclude_pinned_and_hard(pool, policy):
    for i in range(20):
        put(pool, (i, 0), 4096, retention="soft" if i < 5 else "normal", position=i)
    pool.retain((6, 0), "hard")
    with pool.pin((0, 0)), pool.pin((7, 0)):
        victims = pool.victims(1 << 40, policy)
        order = victims.keys[:, 0].tolist()
        assert order[:13] == [5, *range(8, 20)]
        assert sorted(order[13:]) == [1, 2, 3, 4]  # SIEVE's hand is anywhere by then
        assert victims.position.tolist() == order and victims.uses.tolist() == [1] * 17
        assert victims.retention.tolist() == [0] * 13 + [1] * 4
    assert check(pool) == 20 and len(pool.victims(0, policy).keys) == 0
    # SIEVE's hand moves on; the oldest stays the oldest.
    found = [pool.victims(1, policy).keys[0, 0] for _ in range(3)]
    assert len(set(found)) == (3 if policy == "sieve" else 1)
    for wrong in (-1, "x"):
        with pytest.raises(InvalidArgument, match="victims: num_bytes must be"):
            pool.victims(wrong)
    with pytest.raises(InvalidArgument, match="victims: policy must be"):
        pool.victims(1, "fifo")


def test_policy_written_in_python(pool):
    """The least recently used of the largest, by what the pool tells of its objects."""
    for i in range(10):
        put(pool, (i, 0), 4096 * (1 + i % 2), retention="soft" if i == 3 else "normal")
    pool.pin((1, 0)).close()
    objects = pool.objects()
    order = np.lexsort([objects.recency, -objects.num_bytes.astype(np.int64)])
    assert objects.keys[order][:5, 0].tolist() == [3, 5, 7, 9, 1]
    assert objects.retention[order[0]] == 1 and (np.diff(objects.recency[order[5:]]) > 0).all()
    evicted = pool.evict_keys(objects.keys[order][:2])
    assert evicted.keys[:, 0].tolist() == [3, 5] and evicted.num_bytes == 4 * 4096


def test_object_put_again_is_not_evicted_by_its_old_id(pool):
    for i in range(3):
        put(pool, (i, 0), 1)
    objects = pool.objects()
    pool.remove((1, 0))
    put(pool, (1, 0), 1)
    evicted = pool.evict_keys(objects.keys, objects.ids)
    assert sorted(evicted.keys[:, 0].tolist()) == [0, 2] and pool.contains((1, 0))
    assert not len(pool.evict_keys([(1, 0)], [0]).keys)
    with pytest.raises(InvalidArgument, match=r"evict_keys: ids must be \[1\], got shape \(3,\)"):
        pool.evict_keys([(1, 0)], objects.ids)
    with pytest.raises(InvalidArgument, match=r"evict_keys: ids must be \[n\] integers"):
        pool.evict_keys([(1, 0)], ["a"])


def test_lookups_do_not_count_as_uses(pool):
    for i in range(3):
        put(pool, (i, 0), 1)
    keys = [(0, 0), (1, 0), (2, 0)]
    assert pool.contains((0, 0)) and pool.match_prefix(keys) == 3 and pool.contains_each(keys).all()
    assert pool.evict(1).keys.tolist() == [[0, 0]]
