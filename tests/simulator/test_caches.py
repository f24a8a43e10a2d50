"""Eviction policies against naive ones, and the hit rate against an independent replay."""

import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_serving.conductor import InvalidArgument
from mooncake_simulator.caches import OFFLINE, POLICIES, BlockCache, make_policy
from mooncake_simulator.hit_rate import replay
from mooncake_simulator.store import NodeStore
from mooncake_simulator.traces import TraceRequest

INF = float("inf")


class Naive:
    """Each policy as a scan over all blocks: (uses, last use, stored, position, visited)."""

    def __init__(self, name, capacity):
        self.name, self.capacity = name, capacity
        self.blocks = {}
        self.clock = 0
        self.order = []  # SIEVE: oldest first
        self.hand = 0

    def victim(self):
        by = self.blocks.get
        rank = {
            "lru": lambda k: by(k)["used"],
            "fifo": lambda k: by(k)["stored"],
            "lfu": lambda k: (by(k)["uses"], by(k)["used"]),
            "length-aware": lambda k: (by(k)["uses"], -by(k)["position"], by(k)["used"]),
        }
        if self.name != "sieve":
            return min(self.blocks, key=rank[self.name])
        while True:
            if self.hand >= len(self.order):
                self.hand = 0
            key = self.order[self.hand]
            if not self.blocks[key]["visited"]:
                return key
            self.blocks[key]["visited"] = False
            self.hand += 1

    def insert(self, keys):
        for position, key in enumerate(keys):
            self.clock += 1
            if key in self.blocks:
                block = self.blocks[key]
                block["uses"] += 1
                block["used"] = self.clock
                block["visited"] = True
                block["position"] = position
                continue
            if len(self.blocks) == self.capacity:
                victim = self.victim()
                del self.blocks[victim]
                self.order.remove(victim)  # the hand now points at the next newer one,
                self.hand %= max(1, len(self.order))  # or, past the newest, at the oldest
            self.blocks[key] = {
                "uses": 1,
                "used": self.clock,
                "stored": self.clock,
                "position": position,
                "visited": False,
            }
            self.order.append(key)


prompts = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6, unique=True), max_size=40)


@pytest.mark.parametrize("name", POLICIES)
@given(capacity=st.integers(1, 8), prompts=prompts)
@settings(max_examples=60, deadline=None)
def test_policies_evict_as_a_full_scan_would(name, capacity, prompts):
    cache, naive = BlockCache(capacity, make_policy(name)), Naive(name, capacity)
    for prompt in prompts:
        before = set(cache.keys())
        evicted = cache.insert(prompt)
        naive.insert(prompt)
        assert set(cache.keys()) == set(naive.blocks)
        assert set(cache.keys()) | set(evicted) == before | set(prompt)
        assert len(cache) <= capacity


def test_cache_of_capacity_zero_stays_empty():
    cache = BlockCache(0, make_policy("lru"))
    assert cache.insert(["a"]) == ["a"] and len(cache) == 0 and cache.match(["a"]) == 0


def test_unknown_policy_is_rejected():
    with pytest.raises(InvalidArgument, match=r"name must be one of lru.*belady, got 'mru'"):
        make_policy("mru")


def test_blocks_evicted_from_dram_move_to_ssd_and_then_are_lost():
    lost = []
    store = NodeStore(2, ssd_blocks=2, lost=lost.extend)
    store.insert([1, 2])
    store.insert([3, 4])  # 1 and 2 move down
    assert store.match([1, 2]) == (2, 2) and store.match([3, 4]) == (2, 0) and lost == []
    store.insert([5, 6])
    assert store.match([3, 4]) == (2, 2) and store.match([1]) == (0, 0) and lost == [1, 2]


def make_trace(seed, num_requests=400):
    """Sessions that grow: each prompt is an earlier one with blocks added, or a new one."""
    rng = random.Random(seed)
    sessions, requests, fresh = [[]], [], iter(range(10**9))
    for index in range(num_requests):
        prompt = list(rng.choice(sessions[-30:])) if rng.random() < 0.6 else []
        prompt += [next(fresh) for _ in range(rng.randint(1, 6))]
        sessions.append(prompt)
        length = 512 * len(prompt) - rng.randint(0, 511)
        requests.append(TraceRequest(100.0 * index, length, 5, tuple(prompt)))
    return requests


def independent_lru(requests, capacity_blocks):
    held, hits = OrderedDict(), 0
    for request in requests:
        blocks = 0
        while blocks < len(request.hash_ids) and request.hash_ids[blocks] in held:
            blocks += 1
        hits += min(512 * blocks, request.input_length)
        for key in request.hash_ids:
            held.pop(key, None)
            held[key] = True
            if len(held) > capacity_blocks:
                held.popitem(last=False)
    return hits / sum(request.input_length for request in requests)


@pytest.mark.parametrize("capacity_tokens", [512, 10_000, 50_000, 200_000, INF])
def test_hit_rates_equal_an_independent_replay(capacity_tokens):
    requests = make_trace(1)
    ours = replay(requests, capacity_tokens)
    assert ours.hit_rate == pytest.approx(independent_lru(requests, capacity_tokens // 512))


def test_belady_beats_the_others_and_more_memory_never_hurts_lru():
    requests = make_trace(2)
    best = [replay(requests, c, policy="belady").hit_rate for c in (20_000, 60_000, INF)]
    for name in POLICIES:
        rates = [replay(requests, c, policy=name).hit_rate for c in (20_000, 60_000, INF)]
        assert all(b >= r for b, r in zip(best, rates, strict=True)), name
        assert rates[-1] == best[-1]
    lru = [replay(requests, c).hit_rate for c in range(0, 200_000, 5_000)]
    assert lru == sorted(lru)


def test_warm_up_is_replayed_but_not_counted():
    requests = make_trace(3)
    half = replay(requests, INF, warm_up=0.5)
    assert half.input_tokens == sum(r.input_length for r in requests[200:])
    assert half.hit_rate > replay(requests[200:], INF).hit_rate


@pytest.mark.parametrize("capacity", [-1, float("nan"), "x", None])
def test_bad_capacity_is_rejected(capacity):
    with pytest.raises(InvalidArgument, match="capacity_tokens must be >= 0, got"):
        replay([], capacity)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"block_tokens": 0}, "replay: block_tokens must be at least 1, got 0"),
        ({"block_tokens": 0.5}, "replay: block_tokens must be an integer, got 0.5"),
        ({"warm_up": 1}, r"replay: warm_up must be in \[0, 1\), got 1"),
        ({"warm_up": "x"}, r"replay: warm_up must be in \[0, 1\), got 'x'"),
    ],
)
def test_bad_replay_arguments_are_rejected(options, message):
    with pytest.raises(InvalidArgument, match=message):
        replay([], 1e6, **options)


def test_offline_policies_are_not_in_the_online_list():
    assert set(OFFLINE).isdisjoint(POLICIES)
