"""The prefix index against sets of keys, one set per instance."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_serving.conductor import InvalidArgument, KVEvent, PrefixIndex, ShardedIndex

from .support import chain, longest

NUM_INSTANCES = 20  # of which two may be emptied before the index is swept


chains = st.builds(chain, st.integers(0, 255), st.integers(0, 9))
instances = st.integers(0, NUM_INSTANCES - 1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), instances, chains),
        st.tuples(st.just("remove"), instances, st.lists(st.integers(1, 511), max_size=8)),
        st.tuples(st.just("clear"), instances, st.just([])),
    ),
    max_size=30,
)


def do(index, step) -> None:
    name, instance, keys = step
    index.clear(instance) if name == "clear" else getattr(index, name)(instance, keys)


def follow(held: list[set[int]], step) -> None:
    name, instance, keys = step
    if name == "add":
        held[instance] |= set(keys)
    else:
        held[instance] -= set(keys) if name == "remove" else set(held[instance])


@pytest.mark.parametrize(
    "make",
    [
        PrefixIndex,
        lambda n: ShardedIndex(n, 1),
        lambda n: ShardedIndex(n, 3),
        lambda n: ShardedIndex(n, 5, depth=4),
    ],
    ids=["one", "1 shard", "3 shards", "5 shards, depth 4"],
)
@given(steps=steps, asked=st.lists(chains, min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_index_matches_sets_of_keys(make, steps, asked):
    index, held = make(NUM_INSTANCES), [set() for _ in range(NUM_INSTANCES)]
    for step in steps:
        do(index, step)
        follow(held, step)
    for keys in asked:
        assert index.match(keys).tolist() == [longest(one, keys) for one in held]
        for key in keys:
            holders = [i for i, one in enumerate(held) if key in one]
            assert index.holders(key) == holders and index.num_holders(key) == len(holders)


@pytest.mark.parametrize("num_instances", [1, 7, 8, 9, 1000])
def test_every_match_length_of_a_long_chain(num_instances):
    index, keys = PrefixIndex(num_instances), list(range(10_000, 10_600))
    rng = np.random.default_rng(num_instances)
    lengths = rng.integers(0, 601, num_instances)
    for instance, length in enumerate(lengths):
        index.add(instance, keys[:length])
    assert index.match(keys).tolist() == lengths.tolist()
    assert index.match([]).tolist() == [0] * num_instances
    assert len(index) == lengths.max()


def test_repeated_restarts_share_one_sweep(monkeypatch):
    index, sweeps = PrefixIndex(80), []
    sweep = PrefixIndex._sweep
    monkeypatch.setattr(PrefixIndex, "_sweep", lambda self: (sweeps.append(1), sweep(self)))
    for turn in range(100):
        instance = 7 * turn % 80
        keys = range(1000 * turn, 1000 * turn + 3)
        index.clear(instance)
        assert not index.match(keys).any()
        index.add(instance, keys)
        assert index.holders(1000 * turn) == [instance] and index.match(keys)[instance] == 3
        assert len(index._holders) <= (80 + 10) * 3, "what is left of those that were emptied"
    assert len(sweeps) == 100 // (80 // 8)
    assert len(index) == 80 * 3
    for instance in range(80):
        index.clear(instance)
    assert len(index) == len(index._holders) == 0


def test_restarted_instance_does_not_regain_its_old_keys():
    index = PrefixIndex(40)
    for instance in (3, 4):
        index.add(instance, [1, 2])
    index.clear(3)
    assert index.holders(1) == [4] and index.num_holders(1) == 1
    index.add(3, [1])
    assert index.match([1, 2])[3:5].tolist() == [1, 2]
    index.remove(4, [1, 2])
    assert index.holders(1) == [3] and index.holders(2) == [] and len(index) == 1


def test_hole_ends_the_matched_prefix():
    index = PrefixIndex(2)
    index.add(0, [1, 2, 3])
    index.remove(0, [2, 99])
    assert index.match([1, 2, 3]).tolist() == [1, 0]
    index.add(0, [1, 2])
    assert index.match([1, 2, 3]).tolist() == [3, 0]


def test_equal_sets_of_holders_are_one_object():
    index = PrefixIndex(5000)
    for instance in (7, 4999):
        index.add(instance, range(1000))
    index.remove(7, range(0, 1000, 2))
    assert len({id(held) for held in index._holders.values()}) <= 4


def test_match_queries_a_single_shard():
    index = ShardedIndex(2, 8, depth=2)
    index.add(0, [1, 2, 3, 4])
    answering = index.shards[index.shard_of([1, 2, 3, 4])]
    assert answering.match([1, 2, 3, 4]).tolist() == [4, 0]
    assert sorted(len(shard) for shard in index.shards) == [1] * 7 + [4], "block 1 is in all"


def test_removal_goes_to_the_shard_that_has_the_block(monkeypatch):
    index = ShardedIndex(2, 8, depth=2)
    for instance in (0, 1):
        index.add(instance, [1, 2, 3, 4])
    asked = []
    for number, shard in enumerate(index.shards):
        monkeypatch.setattr(shard, "remove", lambda _, keys, n=number: asked.append((n, keys)))
    index.remove(0, [4, 3])
    assert asked == [(index.shard_of([1, 2]), [4, 3])]
    asked.clear()
    index.remove(0, [1])
    assert asked == [(number, [1]) for number in range(8)], "block 1 is in all"


@given(steps=steps)
@settings(max_examples=60, deadline=None)
def test_shards_remember_exactly_the_held_keys(steps):
    index, held = ShardedIndex(NUM_INSTANCES, 3, depth=2), [set() for _ in range(NUM_INSTANCES)]
    for step in steps:
        do(index, step)
        follow(held, step)
    remembered, there = set(index._shard_of_key), set().union(*held) - {1}  # block 1 is in all
    assert remembered == there if index.shards[0].is_swept else remembered >= there
    assert len(index.shards[0]) <= len(set().union(*held)) <= sum(map(len, index.shards))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: PrefixIndex(0), "PrefixIndex: num_instances must be at least 1, got 0"),
        (lambda: PrefixIndex(2).add(2, [1]), r"add: instance must be in \[0, 2\), got 2"),
        (lambda: PrefixIndex(2).clear(-1), r"clear: instance must be in \[0, 2\), got -1"),
        (lambda: PrefixIndex(2).apply(None), "apply: event must be a KVEvent, got None"),
        (lambda: ShardedIndex(2, 3).apply(5), "apply: event must be a KVEvent, got 5"),
        (lambda: KVEvent(0, -(10**5000)), "KVEvent: sequence must be at least 0, got a huge int"),
        (lambda: KVEvent(0, 0, ([0.5], 10**5000)), "stored must be a tuple of integers, got 0.5"),
        (lambda: PrefixIndex(2).apply(KVEvent(3, 0)), "apply: instance must be in"),
        (lambda: KVEvent("a", 0), "KVEvent: instance must be an integer, got 'a'"),
        (lambda: KVEvent(0, -1), "KVEvent: sequence must be at least 0, got -1"),
        (lambda: KVEvent(0, 0, epoch=0.5), "KVEvent: epoch must be an integer, got 0.5"),
        (lambda: KVEvent(0, 0, 5), "KVEvent: stored must be a tuple of chains of keys, got 5"),
        (lambda: KVEvent(0, 0, (5,)), "KVEvent: stored must be a tuple of integers, got 5"),
        (lambda: KVEvent(0, 0, (("x",),)), "stored must be a tuple of integers, got 'x' among"),
        (lambda: KVEvent(0, 0, (), "x"), "KVEvent: removed must be a tuple of integers, got 'x'"),
        (lambda: KVEvent(0, 0, (), (0.5,)), "removed must be a tuple of integers, got 0.5 among"),
        (lambda: PrefixIndex(2.0), "PrefixIndex: num_instances must be an integer, got 2.0"),
        (lambda: ShardedIndex(2, True), "num_shards must be an integer, got True"),
        (lambda: ShardedIndex(2, 0), "num_shards must be at least 1, got 0"),
        (lambda: ShardedIndex(2, 2, depth=0), "depth must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_rejected(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call()


@pytest.mark.parametrize("make", [PrefixIndex, lambda n: ShardedIndex(n, 3)])
@pytest.mark.parametrize(
    "call, message",
    [
        (lambda index: index.match(5), "match: keys must be a tuple of integers, got 5"),
        (
            lambda index: index.match([[]]),
            r"match: keys must be a tuple of integers, got \[\] among",
        ),
        (lambda index: index.match("ab"), "match: keys must be a tuple of integers, got 'ab'"),
        (
            lambda index: index.match([1.0]),
            "match: keys must be a tuple of integers, got 1.0 among",
        ),
        (lambda index: index.match([True]), "match: keys must be a tuple of .*, got True among"),
        (lambda index: index.match({1: 2}), "match: keys must be a tuple of integers, got {1: 2}"),
        (lambda index: index.add(0, 5), "add: keys must be a tuple of integers, got 5"),
        (lambda index: index.add(0, [7, "x"]), "add: keys must be a tuple of integers, got 'x' am"),
        (lambda index: index.remove(0, 5), "remove: keys must be a tuple of integers, got 5"),
        (lambda index: index.remove(0, [1, []]), r"remove: keys must be a .*, got \[\] among"),
        (lambda index: index.remove(9, [1]), r"remove: instance must be in \[0, 2\), got 9"),
    ],
)
def test_bad_keys_are_rejected_and_change_nothing(make, call, message):
    index = make(2)
    index.add(0, [1, 2])
    with pytest.raises(InvalidArgument, match=message):
        call(index)
    assert index.match([1, 2]).tolist() == [2, 0] and index.holders(7) == []


@pytest.mark.parametrize("make", [PrefixIndex, lambda n: ShardedIndex(n, 3)])
def test_keys_may_be_numpy_integers_or_iterators(make):
    index, keys = make(2), np.array([2**62, 2, 3])
    index.add(1, keys)
    assert index.match(keys).tolist() == index.match(keys.tolist()).tolist() == [0, 3]
    index.remove(1, iter([3]))
    assert index.match(tuple(keys)).tolist() == [0, 2]
