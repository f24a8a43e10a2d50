"""Prefixes that are still being computed: who waits for them, and what is left of one given up."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mooncake_serving.router import parse_config
from mooncake_serving.router.call import COMPLETIONS, Call
from mooncake_serving.router.instances import Instances
from mooncake_serving.router.placement import Placed, Placement
from tests.serving.router.support import BLOCK, MODEL, stored

SHARED = [1] * (10 * BLOCK)


class Engines:
    """A placement on one engine without events, where only tokens take time: a second each."""

    def __init__(self):
        entry = {"name": "both", "role": "both", "url": "http://127.0.0.1:1"}
        costs = {"prefill": [0.0, 1.0, 0.0]}
        config = parse_config({"instance": [entry], "costs": costs, "block_size": BLOCK})
        instances = Instances(config.instances, config.max_instances)
        self.now_s = 0.0
        self.placement = Placement(config, instances, lambda: self.now_s)
        self.placement.add(0)
        self.placement.recovered(0, 1 << 20)

    def place(self, tokens: list[int]) -> Placed:
        call = Call(COMPLETIONS, {"model": MODEL}, b"", arrived_s=self.now_s, tokens=tokens)
        placed = self.placement.place(call, adapter="")
        assert isinstance(placed, Placed)
        return placed

    def matched(self, tokens: list[int]) -> int:
        return self.placement.matched_tokens(tokens, "")[0]


def ttft_s(placed: Placed) -> float:
    return placed.decision.prefill.ttft_s


def test_a_burst_waits_for_the_prefill_of_its_prefix():
    engines = Engines()
    engines.place([*SHARED, 2])
    engines.now_s = 60.0
    assert [ttft_s(engines.place([*SHARED, seed])) for seed in (3, 4)] == [102.0, 103.0]


def test_a_prefix_whose_prefill_is_given_up_is_not_cached():
    engines = Engines()
    engines.placement.ended(engines.place([*SHARED, 2]))
    assert engines.matched(SHARED) == 0
    assert ttft_s(engines.place([*SHARED, 3])) == len(SHARED) + 1


def test_a_prefix_that_was_computed_stays_when_another_prefill_is_given_up():
    engines = Engines()
    first = engines.place([*SHARED, 2])
    engines.placement.prefilled(first)
    engines.placement.ended(first)
    engines.placement.ended(engines.place([*SHARED, *[3] * BLOCK]))
    assert engines.matched([*SHARED, *[3] * BLOCK]) == len(SHARED)


def test_who_waits_for_a_prefix_that_is_given_up_computes_it():
    engines = Engines()
    first, second = engines.place([*SHARED, 2]), engines.place([*SHARED, 3])
    engines.placement.ended(first)
    assert engines.matched(SHARED) == len(SHARED)
    assert ttft_s(engines.place([*SHARED, 4])) == len(SHARED) + 1 + 1
    engines.placement.ended(second)
    assert engines.matched(SHARED) == len(SHARED)  # of the third


def test_what_an_engine_has_told_stays_when_the_prefill_is_given_up():
    engines = Engines()
    first = engines.place([*SHARED, 2])
    engines.placement.blocks[0]._stored(stored(SHARED[: 4 * BLOCK]))
    engines.placement.ended(first)
    assert engines.matched(SHARED) == 4 * BLOCK


def parts(tokens: list[int]) -> set[tuple[int, ...]]:
    """What the blocks of a prompt stand for: all tokens up to their ends."""
    return {tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)}


prompts = st.lists(st.integers(1, 2), min_size=1, max_size=4)


@given(st.lists(st.one_of(prompts, st.tuples(st.booleans(), st.integers(0, 5)))))
def test_what_counts_as_cached_was_computed_or_will_be(steps):
    """By requests that come, whose prefill is over, or that are given up, in any order."""
    engines = Engines()
    opened: list[tuple[list[int], Placed]] = []
    computed: list[list[int]] = []
    asked: list[list[int]] = []
    for step in steps:
        if isinstance(step, list):
            tokens = [token for token in step for _ in range(BLOCK)]
            opened.append((tokens, engines.place(tokens)))
            asked.append(tokens)
        elif opened:
            tokens, placed = opened.pop(step[1] % len(opened))
            if step[0]:
                engines.placement.prefilled(placed)
                computed.append(tokens)
            engines.placement.ended(placed)
        there = {part for one in [*computed, *(each for each, _ in opened)] for part in parts(one)}
        for tokens in asked:
            assert engines.matched(tokens) == BLOCK * len(parts(tokens) & there)
    for _, placed in opened:
        engines.placement.ended(placed)
    waits_s = engines.place([9]).decision.prefill.wait_s
    assert waits_s == pytest.approx(0.0)
