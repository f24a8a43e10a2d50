"""Decayed counts against exact ones, and the choices made from them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import object_keys
from mooncake_serving.store.cluster import hot_keys
from mooncake_serving.store.cluster.hot_keys import MAX_HALF_LIVES, HotKeys, UseCounts

from ...threads import in_threads


class Clock:
    def __init__(self):
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class ExactCounts:
    """The same, one number a key and a time."""

    def __init__(self, half_life_s: float, clock: Clock):
        self.half_life_s, self.clock = half_life_s, clock
        self.uses: dict[int, list[float]] = {}

    def add(self, hashes: np.ndarray) -> np.ndarray:
        for key in set(hashes.tolist()):
            self.uses.setdefault(key, []).append(self.clock.now_s)
        return self.counts(hashes)

    def counts(self, hashes: np.ndarray) -> np.ndarray:
        return np.array([self.count(key) for key in hashes.tolist()])

    def count(self, key: int) -> float:
        ages_s = self.clock.now_s - np.array(self.uses.get(key, []))
        return float((0.5 ** (ages_s / self.half_life_s)).sum())

    def total(self) -> float:
        return sum(self.count(key) for key in self.uses)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 9), min_size=1, max_size=12),
            st.sampled_from([0.0, 0.1, 5.0, 60.0, 1e5]),
        ),
        max_size=30,
    )
)
def test_few_objects_are_counted_exactly(calls):
    clock = Clock()
    counts, exact = UseCounts(10.0, clock=clock), ExactCounts(10.0, clock)
    for hashes, wait_s in calls:
        keys = object_keys(hashes, "a")
        np.testing.assert_allclose(counts.add(keys), exact.add(keys[:, 0]), rtol=1e-9)
        clock.now_s += wait_s
        every = np.arange(12, dtype=np.uint64)
        np.testing.assert_allclose(
            counts.counts(object_keys(every, "a")), exact.counts(every), rtol=1e-9, atol=1e-15
        )


def test_sketch_never_undercounts_and_rarely_overcounts():
    clock, rng, width = Clock(), np.random.default_rng(5), 1 << 10
    counts, exact = UseCounts(60.0, width=width, clock=clock), ExactCounts(60.0, clock)
    for _ in range(200):
        hashes = rng.zipf(1.2, 64).astype(np.uint64) % np.uint64(4096)
        counts.add(object_keys(hashes, 1))
        exact.add(hashes)
        clock.now_s += 1.0
    every = np.arange(4096, dtype=np.uint64)
    too_much = counts.counts(object_keys(every, 1)) - exact.counts(every)
    assert too_much.min() > -1e-9
    bound = np.e / width * exact.total()
    assert (too_much > bound).mean() < 1 / 55


def test_keys_of_different_scopes_are_counted_separately():
    counts = UseCounts(clock=Clock())
    hashes = np.arange(512)
    assert (counts.add(object_keys(hashes, 1)) == 1).all()
    assert (counts.add(object_keys(hashes, 2)) == 1).all()
    assert (counts.counts(object_keys(hashes, 3)) == 0).all()


def test_counts_survive_rescaling_over_many_half_lives():
    clock = Clock()
    counts = UseCounts(1.0, clock=clock)
    keys = object_keys([7], 0)
    for _ in range(3 * MAX_HALF_LIVES):
        clock.now_s += 1.0
        count = counts.add(keys)[0]
    assert count == pytest.approx(2.0)  # 1 + 1/2 + 1/4 ...
    clock.now_s += 1e9
    assert counts.counts(keys)[0] == 0
    assert counts.add(keys)[0] == 1


def test_a_second_use_within_a_half_life_differs_from_a_first_one():
    clock = Clock()
    counts = UseCounts(60.0, clock=clock)
    keys = object_keys([1, 2, 3], 0)
    assert not (counts.add(keys) >= 1.5).any()
    clock.now_s += 59
    assert (counts.add(keys[:1]) >= 1.5).all()
    clock.now_s += 2
    assert not (counts.add(keys[1:]) >= 1.5).any()


def test_uses_by_many_threads_are_all_counted():
    counts = UseCounts(clock=Clock())
    keys = object_keys(np.arange(100), 0)

    def use() -> None:
        for _ in range(50):
            counts.add(keys)

    in_threads(*[use] * 4)
    assert (counts.counts(keys) == 200).all()


def test_empty_key_lists():
    assert UseCounts().add(object_keys([], 0)).shape == (0,)
    assert HotKeys().read(object_keys([], 0), np.array([])).shape == (0,)


def test_hot_remote_object_is_chosen_once_per_cooldown():
    clock = Clock()
    hot = HotKeys(2, cooldown_s=30, clock=clock)
    keys = object_keys([1, 2], 0)
    assert hot.read(keys, 1).tolist() == [False, False]
    assert hot.read(keys[:1], 1).tolist() == [False]
    assert hot.read(keys, 1).tolist() == [True, False]
    assert hot.read(keys, 1).tolist() == [False, True]
    clock.now_s += 29.9
    assert hot.read(keys, 1).tolist() == [False, False]
    clock.now_s += 0.2
    assert hot.read(keys, 1).tolist() == [True, True]


def test_objects_with_max_copies_are_not_chosen():
    hot = HotKeys(0, max_copies=3, clock=Clock())
    assert hot.read(object_keys([1, 2, 3], 0), np.array([2, 3, 4])).tolist() == [True, False, False]


def test_rarely_read_object_is_never_chosen():
    clock = Clock()
    hot = HotKeys(2, half_life_s=60, clock=clock)
    for _ in range(1000):
        clock.now_s += 120  # comes to 1 + 1/4 + 1/16 ...
        assert not hot.read(object_keys([1], 0), 1)[0]


def test_cooldown_entries_expire_and_are_bounded(monkeypatch):
    monkeypatch.setattr(hot_keys, "MAX_COOLING", 10)
    clock = Clock()
    hot = HotKeys(0, cooldown_s=30, clock=clock)
    for first in range(0, 100, 5):
        assert hot.read(object_keys(np.arange(first, first + 5), 0), 1).all()
        assert len(hot._cooling) <= 15
    clock.now_s += 31
    hot.read(object_keys([1000], 0), 1)
    assert len(hot._cooling) == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: UseCounts(0), "UseCounts: half_life_s must be above 0, got 0"),
        (lambda: UseCounts(float("nan")), "UseCounts: half_life_s must be above 0, got nan"),
        (lambda: UseCounts("1"), "UseCounts: half_life_s must be above 0, got '1'"),
        (lambda: UseCounts(float("inf")), "UseCounts: half_life_s must be finite, got inf"),
        (lambda: HotKeys("4"), "HotKeys: min_reads must be a number from 0 on, got '4'"),
        (lambda: UseCounts(width=1000), "UseCounts: width must be a power of two >= 2, got 1000"),
        (lambda: HotKeys(-1), "HotKeys: min_reads must be a number from 0 on, got -1"),
        (lambda: HotKeys(max_copies=0), "HotKeys: max_copies must be an integer from 1 on, got 0"),
        (lambda: HotKeys(cooldown_s=-1), "HotKeys: cooldown_s must be a number from 0 on, got -1"),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(InvalidArgument) as caught:
        call()
    assert str(caught.value) == message
