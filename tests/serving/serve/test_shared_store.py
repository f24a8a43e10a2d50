"""A store that engines share behind their own caches."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import numpy as np
import pytest

import mooncake_kernels as mk
from mooncake_serving.engine import SamplingParams, load_model
from mooncake_serving.engine.caching_allocator import DroppedBlocks, KeptBlocks
from mooncake_serving.http_api import ErrorAnswer
from mooncake_serving.serve import stored_blocks
from mooncake_serving.serve.job import Job
from mooncake_serving.serve.model_digest import model_digest
from mooncake_serving.serve.stored_blocks import Loaded, StoredBlocks
from tests.serving.conftest import random_state, write_folder
from tests.serving.router.support import RouterServer
from tests.serving.serve.support import WAIT_S
from tests.waiting import eventually

PROMPT = "a prefix of some blocks, which all of these prompts have in common: "


@pytest.fixture
def url(tmp_path):
    return f"shm:{tmp_path / 'kv'}?size=8MiB"


def cached_tokens(server, prompt, text: str, max_tokens: int = 7, **more) -> int:
    """How many tokens were not computed for an answer, which is the right one."""
    answer = server.complete(prompt, max_tokens, **more).json()
    assert answer["choices"][0]["text"] == text
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def saved(server) -> None:
    eventually(lambda: server.worker.stored._saving_bytes == 0)


def test_another_engine_loads_what_one_has_computed(start, expected, url):
    first, second = start(f"--store={url}"), start(f"--store={url}")
    text, _ = expected(PROMPT + "x", 7)
    assert cached_tokens(first, PROMPT + "x", text) == 0
    saved(first)
    num_tokens = len(load_tokens(first, PROMPT + "x"))
    assert cached_tokens(second, PROMPT + "x", text) == (num_tokens - 1) // 8 * 8
    other, _ = expected(PROMPT + "y", 7)
    assert cached_tokens(second, PROMPT + "y", other) > 0  # of its own by now
    assert not second.worker.stored._store.failures
    for server in (first, second):
        eventually(lambda server=server: server.num_free_blocks == 128)


def load_tokens(server, prompt: str) -> list[int]:
    return server.client.post("/tokenize", json={"prompt": prompt}).json()["tokens"]


def test_blocks_that_were_dropped_here_come_from_the_store(start, expected, url):
    server = start(f"--store={url}", "--num-blocks=24")
    text, _ = expected(PROMPT + "x", 7)
    assert cached_tokens(server, PROMPT + "x", text) == 0
    saved(server)
    for other in ("1" * 100, "2" * 100, "3" * 100):  # they need all of the cache
        server.complete(other, 20)
    loads = server.worker.stored
    assert cached_tokens(server, PROMPT + "x", text) > 0
    assert not loads._store.failures and not loads.is_busy


def test_decode_engine_saves_answers_for_the_next_turn(start, alone, expected, url):
    prefill, decode = (
        start("--role=prefill", f"--store={url}"),
        start("--role=decode", f"--store={url}"),
    )
    handed = {"do_remote_decode": True}
    params = prefill.complete(PROMPT, 1, kv_transfer_params=handed).json()["kv_transfer_params"]
    decode.complete(PROMPT, 30, ignore_eos=True, kv_transfer_params=params)
    tokens, answer, _ = alone(PROMPT, 30, ignore_eos=True)
    turn = [*tokens, *answer.token_ids, 7, 8, 9]
    saved(decode)
    cached = cached_tokens(prefill, turn, expected(turn, 7)[0])
    assert cached == (len(tokens) + 29) // 8 * 8


def test_client_that_leaves_while_its_prompt_is_loaded(start, url, monkeypatch):
    server = start(f"--store={url}")
    monkeypatch.setattr(server.worker.stored, "poll", list)  # it never comes
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT}, timeout=0.3)
    eventually(lambda: server.worker.counts.finished["abort"] == 1)
    monkeypatch.undo()
    assert server.complete("abc", 2).status_code == 200
    eventually(lambda: server.num_free_blocks == 128)


class Strips:
    """Holds, or fails, what an engine reads of its store from the second strip of layers on."""

    def __init__(self, server):
        self.store = server.worker.stored._store
        self._get_each, self.store.get_each = self.store.get_each, self
        self.go_on, self.reached, self.error = threading.Event(), threading.Event(), None

    def __call__(self, names, addresses, sizes):
        if names[0][-1] == 0:
            return self._get_each(names, addresses, sizes)
        self.reached.set()
        assert self.go_on.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return self._get_each(names, addresses, sizes)


@pytest.fixture
def filled(start, url):
    """An engine that has saved the prompt, and one that has not computed it."""
    first, second = start(f"--store={url}"), start(f"--store={url}")
    first.complete(PROMPT, 1)
    saved(first)
    return first, second


def test_first_layers_are_computed_while_the_next_are_loaded(filled, expected, monkeypatch):
    _, server = filled
    monkeypatch.setattr(stored_blocks, "LATE_S", WAIT_S)
    strips, layers = Strips(server), []
    model = server.worker.engine.model
    complete_layer = model.complete_layer

    def record(*arguments):
        layers.append(strips.go_on.is_set())
        strips.go_on.set()  # the first layer is done, and the second one is not there
        return complete_layer(*arguments)

    monkeypatch.setattr(model, "complete_layer", record)
    cached = cached_tokens(server, PROMPT, expected(PROMPT, 7)[0])
    assert cached == (len(load_tokens(server, PROMPT)) - 1) // 8 * 8
    assert layers[:2] == [False, True]
    eventually(lambda: server.num_free_blocks == 128)


@pytest.mark.parametrize("role", ["both", "prefill"])
@pytest.mark.parametrize("how", ["late", "fails", "evicted"])
def test_strip_that_does_not_come_in_time(start, filled, expected, url, monkeypatch, how, role):
    """Its request leaves the step, and goes on with what has come when the load has ended."""
    server = start(f"--role={role}", f"--store={url}")
    monkeypatch.setattr(stored_blocks, "LATE_S", 0.05)
    strips = Strips(server)
    aside, set_aside = threading.Event(), server.worker.stored.set_aside
    server.worker.stored.set_aside = lambda job: (aside.set(), set_aside(job))[1]
    if how == "fails":
        strips.error = RuntimeError("as a test wants it")
    if how == "evicted":  # but for three blocks
        get_each = strips._get_each
        strips._get_each = lambda names, *where: (
            get_each(names, *where) & (np.arange(len(names)) < 3)
        )
    more = {"kv_transfer_params": {"do_remote_decode": True}} if role == "prefill" else {}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.complete, PROMPT, 1, **more)
        assert strips.reached.wait(WAIT_S) and aside.wait(WAIT_S)
        other = server.complete("abc", 1, **more).json()  # it does not wait for the store
        assert other["choices"][0]["text"] == expected("abc", 1)[0]
        assert server.worker.num_waiting == 1
        strips.go_on.set()
        done = answer.result().json()
    assert done["choices"][0]["text"] == expected(PROMPT, 1)[0]
    cached = done["usage"]["prompt_tokens_details"]["cached_tokens"]
    whole = (len(load_tokens(server, PROMPT)) - 1) // 8 * 8
    assert cached == {"late": whole, "fails": 0, "evicted": 24}[how]
    if role == "both":
        eventually(lambda: server.num_free_blocks == 128)
        more, decode = {}, server
    else:
        more, decode = {"kv_transfer_params": done["kv_transfer_params"]}, start("--role=decode")
    answer = decode.complete(PROMPT, 9, **more).json()
    assert answer["choices"][0]["text"] == expected(PROMPT, 9)[0]


def test_blocks_are_not_reused_while_a_strip_is_written_to_them(filled, monkeypatch):
    _, server = filled
    monkeypatch.setattr(stored_blocks, "LATE_S", 0.05)
    strips = Strips(server)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.complete, PROMPT, 7)
        assert strips.reached.wait(WAIT_S)
        [load] = server.worker.stored._loads.values()
        job = load.job
        eventually(lambda: load.waits_for_end)  # it is not in the engine any more
        server.worker.end(job, "abort")
        job.outputs.put_nowait(ErrorAnswer(499, "it has left", "abort"))  # to its own client
        assert answer.result().status_code == 499
    eventually(lambda: server.num_free_blocks == 128 - len(load.targets))
    assert server.complete("abc", 2).status_code == 200
    allocator = server.worker.engine.allocator
    assert {allocator.num_holders(block) for block in load.targets} == {1}
    strips.go_on.set()
    eventually(lambda: server.num_free_blocks == 128)


def test_store_that_fails_is_a_miss(start, expected, url):
    first, second = start(f"--store={url}"), start(f"--store={url}")
    text, _ = expected(PROMPT, 7)
    cached_tokens(first, PROMPT, text)
    saved(first)

    def get_each(names, addresses, sizes):
        raise RuntimeError("as a test wants it")

    store = second.worker.stored._store
    store._get = get_each
    assert cached_tokens(second, PROMPT, text) == 0
    assert store.failures == {"load: RuntimeError": 1}


class Recorded:
    """A store behind an engine that nothing else uses; its calls are recorded, or fail."""

    def __init__(self, url: str, engine, monkeypatch):
        self.engine, self.calls, self.error = engine, [], None
        self.go_on = threading.Event()
        self.go_on.set()
        self.stored = StoredBlocks(url, "a model", engine)
        for name in ("put_each", "match_prefix"):
            called = getattr(self.stored._store, name)
            monkeypatch.setattr(self.stored._store, name, partial(self.call, name, called))

    def call(self, name, called, *arguments):
        self.calls.append(name)
        assert self.go_on.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return called(*arguments)

    def keep(self, tokens: list[int]) -> None:
        names = mk.block_hashes(tokens, 8).tolist()
        self.stored.changed(KeptBlocks(tuple(names), tuple(range(len(names))), None, tuple(tokens)))

    def load(self, tokens: list[int]) -> Loaded:
        block_ids, _ = self.engine.reserve_for([*tokens, 1])
        self.stored.load(Job([*tokens, 1], SamplingParams()), block_ids, 0)
        [loaded] = eventually(self.stored.poll)
        return loaded

    def saved(self) -> None:
        eventually(lambda: self.stored._saving_bytes == 0)


@pytest.fixture
def recorded(url, make_engine, monkeypatch):
    made = Recorded(url, make_engine(keep_prefixes=True), monkeypatch)
    yield made
    made.go_on.set()
    made.stored.close()


def test_loads_come_before_saves(recorded):
    recorded.go_on.clear()
    for first in (1, 2, 3):
        recorded.keep([first] * 16)
    eventually(lambda: recorded.calls)
    with ThreadPoolExecutor(1) as pool:
        loaded = pool.submit(recorded.load, [4] * 16)
        eventually(lambda: recorded.stored.is_busy)
        recorded.go_on.set()
        assert loaded.result().num_cached_tokens == 0
    recorded.saved()
    assert recorded.calls == ["put_each", "match_prefix", "put_each", "put_each"]


@pytest.mark.parametrize("error", [MemoryError(), TypeError("as a test wants it")])
def test_unforeseen_error_is_a_miss_and_logged(recorded, caplog, error):
    recorded.keep([1] * 16)
    recorded.saved()
    recorded.error = error
    assert recorded.load([1] * 16).num_cached_tokens == 0
    recorded.keep([2] * 16)
    recorded.saved()
    told = [record.getMessage() for record in caplog.records]
    assert told == ["blocks cannot be loaded", "blocks cannot be saved"]
    recorded.error = None
    assert recorded.load([1] * 16).num_cached_tokens == 16


def test_loaded_blocks_that_were_not_kept_are_saved_again(recorded):
    """The engine does not know them, and will not say that it drops them."""
    tokens = [1] * 16
    recorded.keep(tokens)
    recorded.saved()
    recorded.stored.changed(DroppedBlocks(tuple(mk.block_hashes(tokens, 8).tolist())))
    loaded = recorded.load(tokens)
    assert loaded.num_cached_tokens == 16
    recorded.keep(tokens)
    assert recorded.calls.count("put_each") == 1  # they are there
    recorded.stored.ended(loaded.job)
    recorded.keep(tokens)
    recorded.saved()
    assert recorded.calls.count("put_each") == 2


def test_digest_tells_models_apart(tiny_folder, tmp_path):
    model, _ = load_model(tiny_folder)
    again, _ = load_model(tiny_folder, batch_invariant=True)
    assert model_digest(model) == model_digest(again) and len(model_digest(model)) == 32
    state = random_state()
    state["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-3
    changed, _ = load_model(write_folder(tmp_path / "changed", state=state))
    state = random_state()
    rows = state["model.layers.0.mlp.down_proj.weight"]
    rows[[0, 1]] = rows[[1, 0]]  # the same numbers, elsewhere
    swapped, _ = load_model(write_folder(tmp_path / "swapped", state=state))
    assert len({model_digest(one) for one in (model, changed, swapped)}) == 3


def test_engines_of_other_models_refuse_each_other_s_blocks(start, tiny_folder, tmp_path):
    state = random_state()
    state["model.norm.weight"][0] += 1.0
    other = write_folder(tmp_path / "other", state=state)
    prefill, decode = start("--role=prefill", f"--model={other}"), start("--role=decode")
    params = prefill.complete("abcd", 1, kv_transfer_params={"do_remote_decode": True}).json()
    answer = decode.complete("abcd", 4, kv_transfer_params=params["kv_transfer_params"])
    assert answer.status_code == 500 and "the model here is" in answer.text


def test_a_router_has_a_hot_prefix_loaded_by_another_engine(start, expected, url):
    """Loaded, not computed: all but the last token of what that engine is sent is cached there."""
    engines = {name: start(f"--store={url}") for name in ("a", "b")}
    router = RouterServer(
        {
            "block_size": 8,
            "instance": [
                {"name": name, "role": "both", "url": engine.url}
                for name, engine in engines.items()
            ],
            "store": {
                "kv_bytes_per_token": 1000.0,
                "bytes_per_s": 1e9,
                "copies": {"rate_per_holder": 0.02},
            },
            "costs": {"prefill": [0.0, 1.0, 0.0]},
        }
    )
    try:
        body = {"model": "tiny", "max_tokens": 4, "temperature": 0}
        for number in range(6):
            prompt = f"{PROMPT}{number}"
            answer = router.client.post("/v1/completions", json=body | {"prompt": prompt})
            assert answer.json()["choices"][0]["text"] == expected(prompt, 4)[0]
        eventually(lambda: any("outcome" in one for one in router.get("/decisions")["copies"]))
        [copy] = router.get("/decisions")["copies"]
    finally:
        router.close()
    assert copy["outcome"] == "made"
    counts = engines[copy["instance"]].worker.counts
    assert counts.finished.total() == 1 and counts.cached_tokens == copy["tokens"]
