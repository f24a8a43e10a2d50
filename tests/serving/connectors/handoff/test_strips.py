"""Layers that leave while the next ones are being computed: each of them once."""

import random
from itertools import product

import pytest
import torch

from mooncake_serving.connectors.handoff import strips_of
from mooncake_serving.connectors.handoff.strips import Computed, Cursor
from tests.serving.connectors.handoff.rank import (
    LAYERS,
    NHD,
    Rank,
    contents_of,
    digest_of,
    settings_of,
    source_of,
)
from tests.serving.connectors.handoff.test_failures import Gate, check_serving
from tests.transfer.support import eventually


@pytest.mark.parametrize(
    ("num_layers", "sizes"),
    [(1, [1]), (2, [1] * 2), (8, [1] * 8), (9, [1, 2, 2, 2, 2]), (30, [2, *[4] * 7])],
)
def test_strips_of_any_number_of_layers(num_layers, sizes):
    strips = strips_of(num_layers)
    assert [len(strip) for strip in strips] == sizes
    assert [layer for strip in strips for layer in strip] == [*range(num_layers)]


@pytest.mark.parametrize("seed", range(20))
def test_each_token_of_each_strip_is_taken_once_and_when_it_is_computed(seed):
    rng = random.Random(seed)
    num_strips, total, cursor = rng.randint(1, 5), rng.randint(1, 60), Cursor(0)
    slot = rng.randint(num_strips, 40)  # of a token in a strip
    taken: set[tuple[int, int]] = set()
    computed = Computed()

    def take() -> None:
        nonlocal cursor
        while rng.random() < 0.8 or computed.num_tokens == total:
            step = cursor.next(computed, num_strips, lambda strips: slot // strips)
            if step is None:
                return
            tokens, strips, cursor = step
            assert 0 < len(tokens) * len(strips) <= slot
            for token, strip in product(tokens, strips):
                assert (token, strip) not in taken
                assert token < computed.num_tokens or (
                    token < computed.ahead and strip < computed.num_strips
                )
                taken.add((token, strip))

    while computed.num_tokens < total:
        stop = min(total, computed.num_tokens + rng.randint(1, 20))
        for done in range(num_strips):
            computed = Computed(computed.num_tokens, stop, done)
            take()
        computed = Computed(stop)
        take()
    take()
    assert taken == {*product(range(total), range(num_strips))}
    assert cursor == Cursor(total)


def compute(sender: Rank, ids: list[int], first: int, stop: int, total: int, layer: int) -> None:
    sender.fill("a", ids, first, stop, total, [layer])
    sender.sender.progress("a", stop, {"0": ids}, num_layers=layer + 1)


def came(receiver: Rank, there: list[int], stop: int, total: int, num_layers: int) -> bool:
    """Whether these layers are there, and no others are from the last 32 tokens on."""
    got, wanted = receiver.read(there, 0, stop), contents_of("a", total)[:, :, :stop]
    assert got[num_layers:, :, stop - 32 :].isnan().all()
    return torch.equal(got[:num_layers], wanted[:num_layers])


@pytest.mark.parametrize("slot_tokens", [16, 1024])
def test_layers_come_while_the_next_ones_are_computed(slot_tokens):
    settings = settings_of(slot_bytes=slot_tokens * LAYERS * 2 * 4 * 8 * 4 + 1024)
    ids, there = [*range(8)], [*range(8, 16)]
    with Rank("sender", settings=settings) as sender, Rank("receiver", settings=settings) as other:
        other.ask("a", source_of(sender), there, 75)
        sender.sender.offer("a", digest_of("a"), 75)
        for first in (0, 32):
            for layer in range(LAYERS):
                compute(sender, ids, first, first + 32, 75, layer)
                assert eventually(lambda f=first, n=layer + 1: came(other, there, f + 32, 75, n))
        compute(sender, ids, 64, 75, 75, 0)
        assert not other.receiver.take_results()
        for layer in (1, 2):
            compute(sender, ids, 64, 75, 75, layer)
        assert other.result("a") is None
        assert other.holds("a", there, 75)
        sender.released("a")


def test_layers_that_no_one_waits_for_leave_at_once(pair):
    """A receiver that comes in the middle of a chunk, and one that comes when all is computed."""
    sender, receiver = pair()
    writes: list[int] = []
    write = sender.endpoint.write
    sender.endpoint.write = lambda name, data, last: (writes.append(1), write(name, data, last))
    ids, there = [1, 2, 3, 4], [5, 6, 7, 8]
    sender.sender.offer("a", digest_of("a"), 64)
    for first in (0, 32):
        for layer in range(LAYERS):
            compute(sender, ids, first, first + 32, 64, layer)
            if (first, layer) == (32, 1):
                receiver.ask("a", source_of(sender), there, 64)
                eventually(lambda: came(receiver, there, 64, 64, 2))
                assert len(writes) == 2  # the first 32 tokens, and two layers of the others
    assert receiver.result("a") is None
    assert receiver.holds("a", there, 64) and len(writes) == 3
    sender.prefill("b", [9, 10], 32)
    receiver.ask("b", source_of(sender), [11, 12], 32)
    assert receiver.result("b") is None and len(writes) == 4


@pytest.mark.parametrize("size", [8, 32])
def test_a_receiver_with_other_blocks_and_heads(size):
    ids, total = [*range(10, 18)], 120
    there = [*range(120 // size), 30]
    sender = Rank("sender")
    receivers = [Rank("receiver", shard=(rank, 2), block_size=size, axes=NHD) for rank in (0, 1)]
    try:
        sender.sender.offer("a", digest_of("a"), total)
        for receiver in receivers:
            receiver.ask("a", source_of(sender), there, total)
        for first, layer in product((0, 48, 96), range(LAYERS)):
            compute(sender, ids, first, min(first + 48, total), total, layer)
        for receiver in receivers:
            assert receiver.result("a") is None
            assert receiver.holds("a", there, total)
    finally:
        for rank in (*receivers, sender):
            rank.close()


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_the_end_of_either_side_in_the_middle_of_a_layer(pair, side):
    sender, receiver = pair(num_slots=2)
    ids, there = [1, 2], [5, 6]
    receiver.ask("a", source_of(sender), there, 32)
    sender.sender.offer("a", digest_of("a"), 32)
    compute(sender, ids, 0, 32, 32, 0)
    eventually(lambda: came(receiver, there, 32, 32, 1))
    gate = Gate(sender.endpoint, "write")
    compute(sender, ids, 0, 32, 32, 1)
    gate.wait()
    if side == "sender":
        sender.sender.drop("a", "as a test wants it")
        gate.open()
        assert "as a test wants it" in receiver.result("a")
    else:
        receiver.receiver.cancel("a")
        for layer in receiver.layers:
            layer.fill_(7.0)  # another request's by now
        gate.open()
        assert "cancelled" in receiver.result("a")
        eventually(lambda: receiver.receiver.num_free_slots == 2)
        assert all((layer == 7.0).all() for layer in receiver.layers)
    check_serving(sender, receiver)


def test_a_request_that_is_preempted_in_the_middle_of_a_layer(pair):
    sender, receiver = pair()
    ids, others, there = [1, 2, 3, 4], [11, 12, 13, 14], [5, 6, 7, 8]
    receiver.ask("a", source_of(sender), there, 64)
    sender.sender.offer("a", digest_of("a"), 64)
    compute(sender, ids, 0, 32, 64, 0)
    eventually(lambda: came(receiver, there, 32, 64, 1))
    sender.sender.pause("a")
    for layer in sender.layers:  # they are someone else's now
        layer.fill_(7.0)
    for first, layer in product((0, 16, 32, 48), range(LAYERS)):  # in smaller chunks
        compute(sender, others, first, first + 16, 64, layer)
    assert receiver.result("a") is None
    assert receiver.holds("a", there, 64)
    check_serving(sender, receiver)
