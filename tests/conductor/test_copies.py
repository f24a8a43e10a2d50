"""Heat, replicas of hot blocks, swaps of cold ones."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_serving.conductor import (
    CachedBlock,
    Heat,
    InvalidArgument,
    ReplicaPolicy,
    SwapAction,
    Why,
    choose_swaps,
)

from .support import BLOCK, COSTS, make


def heated(keys, per_second, seconds=600, half_life_s=60.0) -> Heat:
    heat = Heat(half_life_s)
    for step in range(seconds * per_second):
        heat.touch(keys, step / per_second)
    return heat


def test_a_steady_rate_is_reported_as_it_is():
    heat = heated([1], per_second=5)
    assert heat.rate(1, 600.0) == pytest.approx(5, rel=0.02)
    assert heat.rate(1, 660.0) == pytest.approx(2.5, rel=0.02), "half of it, a half-life later"
    assert heat.rate(2, 600.0) == 0


def test_the_keys_requested_last_are_remembered():
    heat = Heat(10.0, max_blocks=2)
    heat.touch([1, 2], 0.0)
    heat.touch([1, 3], 50.0)
    assert len(heat) == 2 and heat.rate(2, 50.0) == 0
    assert heat.rate(1, 50.0) == pytest.approx(math.log(2) / 10 * (1 + 1 / 32))


def advise(conductor, heat, keys=range(1, 7), rate=1.0, max_holders=3):
    policy = ReplicaPolicy(rate, max_holders, BLOCK)
    return policy.advise(
        tuple(keys), heat, conductor.index, conductor.cluster, COSTS.transfer, 600.0
    )


def test_hot_prefix_is_copied_to_the_least_loaded_instance():
    conductor = make(4)
    conductor.index.add(1, range(1, 7))
    conductor.cluster.free_at_s[:4] = 700, 800, 650, 680
    heat = heated([1, 2, 3, 4], per_second=2)  # blocks 5 and 6 are not
    advice = advise(conductor, heat)
    assert (advice.keys, advice.source, advice.target) == ((1, 2, 3, 4), 1, 2)
    assert advice.num_tokens == 400 and advice.seconds == pytest.approx(0.04)
    assert advice.reason.why is Why.HOT
    conductor.index.add(2, advice.keys)
    assert advise(conductor, heat) is None, "2 requests a second, 2 holders"
    assert advise(conductor, heat, rate=0.9).target == 3
    assert advise(conductor, heat, rate=0.9, max_holders=2) is None


def test_only_missing_blocks_are_copied():
    conductor = make(2)
    conductor.index.add(0, range(1, 7))
    conductor.index.add(1, range(1, 3))
    advice = advise(conductor, heated(range(1, 7), 3))
    assert (advice.keys, advice.target) == ((3, 4, 5, 6), 1)


@pytest.mark.parametrize("max_holders", [3, 8])
def test_hot_document_after_a_shared_prompt_is_copied(max_holders):
    """Block 1 is on 4 instances: by max_holders, or by 3 requests a second, those are enough."""
    conductor = make(6)
    for instance in range(1, 5):
        conductor.index.add(instance, [1])
    conductor.index.add(1, range(1, 7))
    conductor.cluster.free_at_s[:6] = 0, 0, 700, 650, 700, 0
    heat = heated([1, 2, 3, 4], 3)  # blocks 5 and 6 are not
    advice = advise(conductor, heat, max_holders=max_holders)
    assert (advice.keys, advice.source, advice.target) == ((2, 3, 4), 1, 3), "0 lacks block 1"
    assert "2.99 times a second, over 1.00 for each of its 1 holders" in str(advice.reason)
    conductor.cluster.up[2:5] = False
    advice = advise(conductor, heat, max_holders=max_holders)
    assert (advice.keys, advice.source, advice.target) == ((1, 2, 3, 4), 1, 0)
    conductor.cluster.up[1] = False
    assert advise(conductor, heat, max_holders=max_holders) is None, "block 2 is nowhere"


def test_blocks_behind_one_without_a_holder_are_not_copied():
    conductor = make(3)
    conductor.index.add(0, range(1, 7))
    conductor.index.remove(0, [1])
    assert advise(conductor, heated(range(1, 7), 3)) is None


def test_no_instance_to_copy_to_or_from():
    conductor = make(2)
    heat = heated(range(1, 7), 3)
    assert advise(conductor, heat) is None
    conductor.index.add(0, range(1, 7))
    conductor.cluster.up[1] = False
    assert advise(conductor, heat) is None
    conductor.cluster.up[:] = [False, True, True]
    assert advise(conductor, heat) is None, "the holder is down"


def chain(keys, parent=None):
    blocks = []
    for key in keys:
        blocks.append(CachedBlock(key, parent, len(blocks) * BLOCK, BLOCK))
        parent = key
    return blocks


def swaps(blocks, count, heat, conductor=None, load_s=None):
    conductor = conductor or make(2)
    return choose_swaps(
        blocks,
        count,
        0,
        heat=heat,
        index=conductor.index,
        cluster=conductor.cluster,
        costs=COSTS,
        now_s=600.0,
        load_s=load_s,
    )


def test_coldest_blocks_and_chain_ends_are_evicted_first():
    heat = heated([1, 2, 3], 1)
    heat.touch([11, 12], 600.0)
    left = swaps(chain([1, 2, 3]) + chain([11, 12]), 4, heat)
    assert [swap.key for swap in left] == [12, 11, 3, 2]
    assert all(swap.action is SwapAction.DROP for swap in left)
    assert len(swaps(chain([1, 2]), 9, heat)) == 2 and swaps(chain([1]), 0, heat) == []


def test_blocks_with_another_holder_leave_before_those_without():
    """100 tokens take 0.1 s to compute and 0.01 s to fetch."""
    conductor = make(2)
    conductor.index.add(0, [1, 2])
    conductor.index.add(1, [2])
    heat = heated([1, 2], 1)
    blocks = chain([1]) + chain([2])
    first, second = swaps(blocks, 2, heat, conductor)
    assert (first.key, first.reason.why) == (2, Why.HELD_ELSEWHERE)
    assert first.reason.values["holders"] == 1
    assert (second.key, second.reason.why) == (1, Why.COLD)


@pytest.mark.parametrize("listed", [[3], [2, 3], [1, 2, 3]], ids=str)
@pytest.mark.parametrize("lost", [[2], [1, 2]], ids=str)
def test_replica_without_its_prefix_does_not_count_as_a_copy(listed, lost):
    conductor = make(2)
    for instance in (0, 1):
        conductor.index.add(instance, [1, 2, 3])
    heat = heated([1, 2, 3], 1)
    blocks = [block for block in chain([1, 2, 3]) if block.key in listed]
    assert swaps(blocks, 1, heat, conductor, load_s=0.02)[0].action is SwapAction.DROP
    conductor.index.remove(1, lost)
    (last,) = swaps(blocks, 1, heat, conductor, load_s=0.02)
    assert (last.key, last.action, last.reason.why) == (3, SwapAction.DEMOTE, Why.WORTH_KEEPING)


def test_blocks_of_a_down_instance_do_not_count_as_copies():
    conductor = make(3)
    for instance in (0, 1, 2):
        conductor.index.add(instance, [1, 2])
    heat = heated([1, 2], 1)
    conductor.cluster.up[1] = False
    (swap,) = swaps(chain([1, 2]), 1, heat, conductor, load_s=0.02)
    assert (swap.action, swap.reason.values["holders"]) == (SwapAction.DROP, 1)
    conductor.cluster.up[2] = False
    (swap,) = swaps(chain([1, 2]), 1, heat, conductor, load_s=0.02)
    assert (swap.action, swap.reason.why) == (SwapAction.DEMOTE, Why.WORTH_KEEPING)


def test_load_of_a_down_instance_moves_to_the_remaining_holders():
    """Block 1 is asked for 3 times a second, and may be on 2 instances."""
    conductor = make(4)
    for instance in range(3):
        conductor.index.add(instance, [1])
    heat = heated([1], 3)
    assert advise(conductor, heat, keys=[1], rate=1.2, max_holders=2) is None
    conductor.cluster.up[1:3] = False
    advice = advise(conductor, heat, keys=[1], rate=1.2, max_holders=2)
    assert (advice.keys, advice.source, advice.target) == ((1,), 0, 3)
    assert advice.reason.values["holders"] == 1


def test_prefix_gap_is_seen_only_within_the_listed_blocks():
    """Instance 1 has lost block 1, and holds 2 and 3."""
    conductor = make(2)
    for instance in (0, 1):
        conductor.index.add(instance, [1, 2, 3])
    conductor.index.remove(1, [1])
    one, two, three = chain([1, 2, 3])
    heat = heated([1, 2, 3], 1)
    assert swaps([two, three], 1, heat, conductor)[0].reason.why is Why.COLD
    assert swaps([three, two, one], 1, heat, conductor)[0].reason.why is Why.COLD
    assert swaps([three], 1, heat, conductor)[0].reason.why is Why.HELD_ELSEWHERE


def test_last_copy_is_demoted_if_loading_is_faster():
    heat = heated([1], 1)
    (swap,) = swaps(chain([1]), 1, heat, load_s=0.02)
    assert swap.action is SwapAction.DEMOTE and swap.reason.why is Why.WORTH_KEEPING
    (swap,) = swaps(chain([1]), 1, heat, load_s=0.2)
    assert swap.action is SwapAction.DROP and swap.reason.why is Why.COLD
    assert str(swap.reason).endswith("a second, and to recompute it takes 0.1000 s")


@given(
    tree=st.lists(st.integers(0, 30), min_size=1, max_size=25),
    asked=st.lists(st.integers(0, 24), max_size=30),
    count=st.integers(0, 25),
)
@settings(max_examples=80, deadline=None)
def test_block_is_never_evicted_before_its_successors(tree, asked, count):
    blocks: list[CachedBlock] = []
    for key, choice in enumerate(tree):
        parent = blocks[choice] if choice < len(blocks) else None
        start = parent.prefix_tokens + BLOCK if parent else 0
        blocks.append(CachedBlock(key, parent.key if parent else None, start, BLOCK))
    heat = Heat()
    for key in asked:
        heat.touch([key], 600.0)
    left = [swap.key for swap in swaps(blocks, count, heat)]
    assert len(left) == min(count, len(blocks)) == len(set(left))
    for block in blocks:
        if block.parent in left:
            assert left.index(block.key) < left.index(block.parent)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Heat(0), "Heat: half_life_s must be positive, got 0"),
        (lambda: Heat().touch([1], math.nan), "touch: now_s must be a finite number, got nan"),
        (lambda: Heat().touch("ab", 0.0), "touch: keys must be a tuple of integers, got 'ab'"),
        (lambda: Heat().touch(5, 0.0), "touch: keys must be a tuple of integers, got 5"),
        (lambda: Heat().touch([1, 2.0], 0.0), "touch: keys must be .* got 2.0 among them"),
        (lambda: Heat(max_blocks=0), "Heat: max_blocks must be at least 1, got 0"),
        (lambda: ReplicaPolicy(0), "rate_per_holder must be positive, got 0"),
        (lambda: swaps([], -1, Heat()), "num_needed must be at least 0, got -1"),
        (lambda: swaps([], 1, Heat(), load_s=-1), "load_s must be at least 0, got -1"),
    ],
)
def test_bad_arguments_are_rejected(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call()
