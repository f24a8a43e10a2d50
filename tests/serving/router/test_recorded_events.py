"""A router's view of vLLM's cache, from what vLLM 0.32 has published: lost, repeated, out of order.

``vllm_events.jsonl`` was recorded by tests/serving/in_vllm/record_events.py.
"""

import base64
import json
import random
from pathlib import Path

import pytest

from mooncake_serving.conductor import (
    Cluster,
    Conductor,
    Costs,
    NicTransfer,
    PrefixIndex,
    Role,
    Slo,
)
from mooncake_serving.router.block_names import block_names
from mooncake_serving.router.fitted_costs import FittedDecode, FittedPrefill
from mooncake_serving.router.known_blocks import KnownBlocks
from mooncake_serving.store.events import AllBlocksCleared, BlockRemoved, BlockStored, subscribe
from mooncake_serving.store.events import replay as replay_module
from mooncake_serving.store.events.messages import decode, encode
from tests.serving.router.support import Events

SIZE = 16  # tokens of a block of the router, two of which are one of vLLM's
WAIT_S = 60.0
LINES = Path(__file__).with_name("vllm_events.jsonl").read_text().splitlines()
PAYLOADS = [base64.b64decode(payload) for _, payload in map(json.loads, LINES)]
END = encode([], 0, "map")
SEEDS = range(4)
LOST = (10, 11, 12)  # never come


class Engine:
    """What an engine holds that publishes some batches."""

    def __init__(self, payloads):
        self.held, self.before = set(), {}  # of each block: its tokens and those before it
        for payload in payloads:
            for event in decode(payload)[1]:
                if isinstance(event, BlockStored):
                    self._stored(event)
                elif isinstance(event, BlockRemoved):
                    self.held -= set(event.block_hashes)
                elif isinstance(event, AllBlocksCleared):
                    self.held = set()

    def _stored(self, event):
        tokens = list(self.before[event.parent_block_hash]) if event.parent_block_hash else []
        for index, name in enumerate(event.block_hashes):
            size = event.block_size
            tokens += event.token_ids[index * size : (index + 1) * size]
            self.before[name] = tuple(tokens)
            self.held.add(name)

    def prefixes(self):
        """Of all blocks that there ever were: all tokens, and how many of them are held."""
        held = {self.before[name][:end] for name in self.held for end in ends(self.before[name])}
        for tokens in self.before.values():
            num_held = 0
            while tokens[: num_held + SIZE] in held and num_held < len(tokens):
                num_held += SIZE
            yield tokens, num_held


def ends(tokens):
    """Where the router's blocks end in vLLM's last block of some tokens."""
    return range(len(tokens), len(tokens) - 32, -SIZE)


class Listener:
    """A router's view of one engine, by its events."""

    def __init__(self, has_replay):
        costs = Costs(FittedPrefill((1, 0, 0)), FittedDecode((1, 0, 0)), NicTransfer(1, 1))
        self.conductor = Conductor(Cluster([Role.BOTH]), PrefixIndex(1), costs, Slo(1, 1))
        self.blocks = KnownBlocks(self.conductor, 0, SIZE, 100)
        self.events = Events()
        replay = self.events.replay if has_replay else None
        self.heard = subscribe(self.events.endpoint, replay_endpoint=replay)
        while not self.heard.num_malformed:  # until it is connected
            self.events.send_again(0, b"no batch")
            self.heard.receive(0.02)

    def hear_all(self):
        """Apply everything, up to a last batch without events."""
        self.events.send_encoded(END)
        while (batch := self.heard.receive(WAIT_S)).events:
            self.blocks.apply(batch)
        self.blocks.apply(batch)

    def num_held(self, tokens):
        return SIZE * int(self.conductor.index.match(block_names(tokens, SIZE))[0])

    def close(self):
        self.heard.close()
        self.events.close()


@pytest.fixture
def listen(monkeypatch):
    monkeypatch.setattr(replay_module, "WAIT_S", WAIT_S)
    made = []

    def start(*, has_replay=True):
        made.append(Listener(has_replay))
        return made[-1]

    yield start
    for one in made:
        one.close()


def assert_same(router, engine):
    assert router.blocks.num_held == len(engine.held) > 0
    for tokens, num_held in engine.prefixes():
        assert router.num_held(tokens) == num_held


def test_the_recording_has_all_that_happens_to_blocks():
    kinds = [type(event) for payload in PAYLOADS for event in decode(payload)[1]]
    assert {BlockStored, BlockRemoved, AllBlocksCleared} == set(kinds)
    engine = Engine(PAYLOADS)
    assert 20 < len(engine.held) < len(engine.before) / 2


def test_what_is_held_is_known(listen):
    router = listen()
    for payload in PAYLOADS:
        router.events.send_encoded(payload)
    router.hear_all()
    assert_same(router, Engine(PAYLOADS))
    assert router.blocks.num_gaps == router.blocks.num_unnamed == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_lost_repeated_and_late_batches_change_nothing_where_they_can_be_replayed(listen, seed):
    draw, router = random.Random(seed), listen()
    late = []
    for number, payload in enumerate(PAYLOADS):
        is_lost = draw.random() < 0.3
        router.events.send_encoded(payload, is_lost=is_lost)
        if is_lost or draw.random() < 0.2:
            late.append((number, payload))
        if draw.random() < 0.3:
            draw.shuffle(late)
            for again in late[: draw.randrange(4)]:
                router.events.send_again(*again)
    router.hear_all()
    assert_same(router, Engine(PAYLOADS))
    assert router.blocks.num_gaps == 0 < router.heard.num_repeated


@pytest.mark.parametrize(("seed", "share_late"), [(0, 0.0), (1, 0.15), (2, 0.15), (3, 0.15)])
def test_nothing_is_believed_to_be_held_that_is_not_where_batches_are_lost_for_good(
    listen, seed, share_late
):
    draw, router = random.Random(seed), listen(has_replay=False)
    late = []
    for number, payload in enumerate(PAYLOADS):
        is_late = draw.random() < share_late
        router.events.send_encoded(payload, is_lost=is_late or number in LOST)
        late += [(number, payload)] * is_late
        if late and draw.random() < 0.2:
            router.events.send_again(*late.pop(draw.randrange(len(late))))
    router.hear_all()
    engine = Engine(PAYLOADS)
    assert router.blocks.num_gaps > 0
    for tokens, num_held in engine.prefixes():
        assert router.num_held(tokens) <= num_held
    if not share_late:  # all that was stored since the gap
        assert 0 < router.blocks.num_held <= len(engine.held)


def test_a_restarted_engine_holds_what_it_has_told_since(listen):
    router = listen()
    cleared = max(
        number
        for number, payload in enumerate(PAYLOADS)
        if AllBlocksCleared in map(type, decode(payload)[1])
    )
    for payload in PAYLOADS[:cleared]:
        router.events.send_encoded(payload)
    router.hear_all()
    again = PAYLOADS[cleared:]
    router.events.restart()
    for payload in again:
        router.events.send_encoded(payload)
    router.hear_all()
    assert_same(router, Engine(again))
    assert router.blocks.num_gaps == 1
