"""What vLLM's own publisher says of the store, heard over ZeroMQ as a router hears it."""

from collections.abc import Sequence

import pytest

from mooncake_serving.conductor import KVEvent, PrefixIndex
from mooncake_serving.store import Store
from mooncake_serving.store.events import BlockRemoved, BlockStored, subscribe
from tests.metadata.support import free_port
from tests.serving.in_vllm.support import (
    BLOCK,
    Engine,
    Vllm,
    num_in_blocks,
    random_prompts,
    wait_for,
)

PROMPTS = random_prompts(6, seed=11)
NUM_TOKENS = 4
SHORT = [5] * 8  # less than a block


class Router:
    """Knows of each block of the store which tokens it has, and what is before it."""

    def __init__(self, vllm: Vllm, url: str, role: str = "kv_both", **options: object):
        ports = free_port(), free_port()
        connector = {
            "kv_connector": "StoreConnector",
            "kv_connector_module_path": "mooncake_serving.connectors.vllm",
            "kv_role": role,
            "kv_connector_extra_config": {"url": url},
        }
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{ports[0]}",
            "replay_endpoint": f"tcp://*:{ports[1]}",
        }
        self.engine: Engine = vllm.engine(
            connector, options={"kv_events_config": events, **options}
        ).wait()
        address = "tcp://127.0.0.1:"
        self._heard = subscribe(f"{address}{ports[0]}", replay_endpoint=f"{address}{ports[1]}")
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        self.on_device: dict[int, tuple[int | None, list[int]]] = {}
        self.removed: list[int] = []
        self.index, self._count = PrefixIndex(1), 0

    def hear(self) -> None:
        """Take what comes within a moment."""
        while (batch := self._heard.receive(0.05)) is not None:
            for event in batch.events:
                if isinstance(event, BlockStored):
                    self._stored(event)
                elif isinstance(event, BlockRemoved) and event.medium == "CPU":
                    for name in event.block_hashes:
                        del self.blocks[name]
                    self.removed += event.block_hashes
                    self._tell(removed=tuple(event.block_hashes))

    def _stored(self, event: BlockStored) -> None:
        assert event.block_size == BLOCK
        known = {"CPU": self.blocks, "GPU": self.on_device}[event.medium]
        parent = event.parent_block_hash
        for i, name in enumerate(event.block_hashes):
            known[name] = parent, event.token_ids[i * BLOCK : (i + 1) * BLOCK]
            parent = name
        if event.medium == "CPU":
            self._tell(stored=(tuple(self.chain(parent)),))

    def _tell(self, **what: object) -> None:
        self.index.apply(KVEvent(0, self._count, **what))
        self._count += 1

    def chain(self, name: int | None) -> list[int]:
        """The blocks up to one."""
        names = []
        while name is not None:
            names.append(name)
            name = self.blocks[name][0]
        return names[::-1]

    def tokens(self, name: int) -> list[int]:
        """All tokens up to the end of a block."""
        return [token for one in self.chain(name) for token in self.blocks[one][1]]

    def prompts(self) -> list[list[int]]:
        """The tokens that the store has, of each prompt."""
        parents = {parent for parent, _ in self.blocks.values()}
        return sorted(self.tokens(name) for name in self.blocks if name not in parents)

    def until(self, prompts: Sequence[Sequence[int]]) -> None:
        """Wait until that is what there is of these."""

        def is_known() -> bool:
            self.engine.serve([SHORT], 1)  # without steps, an engine publishes nothing
            self.hear()
            return self.prompts() == sorted(map(list, prompts))

        wait_for(is_known, self.engine)

    def close(self) -> None:
        self._heard.close()
        self.engine.end()


def in_blocks(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list:
    """The full blocks of prompts and what follows: of the last token nothing is computed."""
    whole = [[*p, *a][:-1] for p, a in zip(prompts, answers, strict=True)]
    return [tokens[: len(tokens) // BLOCK * BLOCK] for tokens in whole]


@pytest.fixture
def router(vllm, tmp_path):
    """Starts engines on one pool, with a router each."""
    made = []

    def start(**options) -> Router:
        made.append(Router(vllm, f"shm:{tmp_path}/pool?size=64MiB", **options))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_router_knows_the_tokens_of_what_the_store_has(router, tmp_path):
    one = router()
    answers = one.engine.serve(PROMPTS, NUM_TOKENS)["tokens"]
    expected = in_blocks(PROMPTS, answers)
    one.until(expected)
    assert one.blocks.items() <= one.on_device.items(), "as vLLM tells of its own cache"
    for tokens in expected:
        [last] = [name for name in one.blocks if one.tokens(name) == tokens]
        keys = one.chain(last)
        assert one.index.match(keys).tolist() == [len(keys)]

    other = router(role="kv_consumer")
    loaded = other.engine.serve(PROMPTS, 1)["num_cached"]
    assert loaded == [num_in_blocks(prompt) for prompt in PROMPTS]
    other.until([tokens[:count] for tokens, count in zip(expected, loaded, strict=True)])

    with Store.open(tmp_path / "pool") as store:
        for key in store.list_objects()[0].tolist():
            assert store.remove_key(tuple(key))
    more = random_prompts(1, seed=12)
    for each in (one, other):
        each.until([])
        assert each.index.match(keys).tolist() == [0]
    assert len(one.removed) == len(set(one.removed)) == sum(len(t) // BLOCK for t in expected)
    one.until(in_blocks(more, one.engine.serve(more, NUM_TOKENS)["tokens"]))


def test_block_is_told_once_by_an_engine_of_two_workers(router):
    one = router(tensor_parallel_size=2, distributed_executor_backend="mp")
    answers = one.engine.serve(PROMPTS, NUM_TOKENS)["tokens"]
    one.until(in_blocks(PROMPTS, answers))
