"""Requests that let an engine compute their prompts from similar ones: ``kv_reuse`` "semantic"."""

import argparse
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch

import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.engine import (
    Engine,
    NotFinite,
    PagedKVCache,
    SamplingParams,
    SemanticCache,
    load_model,
)
from mooncake_serving.engine.caching_allocator import KeptBlocks
from mooncake_serving.serve import engine as engine_command
from mooncake_serving.serve import options as serve_options
from mooncake_serving.serve import up as up_command
from tests.serving.conftest import LAYER_SHAPES, LAYERS, VOCABULARY, random_state, write_folder
from tests.serving.router.support import RouterServer
from tests.serving.serve.support import BLOCK, EngineServer, engine_options, events_of, text_of
from tests.waiting import eventually

NUM_LAYERS = 5  # of two, all keys and values would be computed from the tokens
SEMANTIC = {"kv_reuse": "semantic"}
NUM_TOKENS = 12


def drawn(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, len(VOCABULARY), (count,), generator=generator).tolist()


DOCUMENT = drawn(100, 1)
EDITED = drawn(7, 2) + DOCUMENT  # one that begins otherwise
BEGUN = drawn(2 * BLOCK, 3)  # two blocks, which others may begin with


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory):
    state = random_state()
    for layer in range(LAYERS, NUM_LAYERS):
        for name in LAYER_SHAPES:
            before = state[f"model.layers.{layer % LAYERS}.{name}.weight"]
            state[f"model.layers.{layer}.{name}.weight"] = before.roll(layer, 0).contiguous()
    folder = tmp_path_factory.mktemp("deep") / "model"
    return write_folder(folder, config={"num_hidden_layers": NUM_LAYERS}, state=state)


@pytest.fixture
def launch(deep_folder):
    """Starts engine servers of it; those that keep prompts do so of short ones, too."""
    made = []

    def launched(*more: str, blocks: int = 64) -> EngineServer:
        server = EngineServer(deep_folder, *([f"--semantic-blocks={blocks}"] * (blocks > 0)), *more)
        made.append(server)
        if blocks:
            cache = server.worker.similar.cache
            cache.min_tokens, cache.threshold = 8, 0.5
        return server

    yield launched
    for server in made:
        server.close()


@pytest.fixture(scope="module")
def alone(deep_folder):
    """The text that an engine alone generates, from a prompt that is kept if one is given."""
    model, tokenizer = load_model(deep_folder, batch_invariant=True)

    def generate(prompt: list[int], kept: list[int] | None = None) -> str:
        engine = Engine(model, PagedKVCache(model.config, 64, block_size=BLOCK))
        params = SamplingParams(max_tokens=NUM_TOKENS)
        if kept is None:
            [done] = engine.generate([prompt], params)
            ids, reason = done.token_ids, done.finish_reason
        else:
            cache = SemanticCache(engine, 64, threshold=0.5, min_tokens=8)
            engine.release(cache.prefill(kept, keep="exact").prefilled.block_ids)
            filled, reuse, _ = cache.prefill(prompt)
            assert reuse.is_approximate
            engine.add_prefilled(prompt, filled.first_token, filled.block_ids, params)
            outputs = [output for _ in range(NUM_TOKENS) for output in _step(engine)]
            ids, reason = [one.token_id for one in outputs], outputs[-1].finish_reason
        return tokenizer.decode(ids if reason == "length" else ids[:-1])

    return generate


def _step(engine: Engine):
    return engine.step() if engine.has_work else []


def ask(server: EngineServer, prompt: list[int], **more) -> tuple[str, dict[str, int]]:
    """A request's text, and the details of its usage."""
    answer = server.complete(prompt, NUM_TOKENS, **more)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    return told["choices"][0]["text"], told["usage"]["prompt_tokens_details"]


def all_free(*servers: EngineServer) -> None:
    for server in servers:
        eventually(lambda server=server: server.num_free_blocks == 128)


def keeps(server: EngineServer, prompt: list[int]) -> list[bool]:
    """Which of a prompt's blocks others may begin with."""
    names = mk.block_hashes(prompt, BLOCK).tolist()
    return [server.worker.engine.allocator.keeps(name) for name in names]


def test_similar_prompt_is_computed_from_the_one_that_is_kept(launch, alone):
    server = launch()
    assert ask(server, DOCUMENT, **SEMANTIC) == (
        alone(DOCUMENT),
        {"cached_tokens": 0, "similar_tokens": 0},
    )
    text, details = ask(server, EDITED, **SEMANTIC)
    assert text == alone(EDITED, DOCUMENT)
    assert details["cached_tokens"] == 0 and 80 < details["similar_tokens"] <= 100
    assert server.metric("mooncake_engine_similar_tokens_total") == details["similar_tokens"]
    streamed = server.complete(EDITED, NUM_TOKENS, stream=True, **SEMANTIC)
    assert text_of(events_of(streamed)) == text
    all_free(server)


def test_only_prompts_of_such_requests_are_kept_and_only_they_reuse(launch, alone):
    server = launch()
    ask(server, DOCUMENT)
    assert ask(server, EDITED, **SEMANTIC)[1]["similar_tokens"] == 0
    server.worker.similar.cache.forget(0)
    ask(server, DOCUMENT, **SEMANTIC)
    assert len(server.worker.similar.cache) == 1
    other = drawn(5, 8) + DOCUMENT
    assert ask(server, other, kv_reuse="exact") == (alone(other), {"cached_tokens": 0})


def test_what_is_approximate_is_kept_for_no_one(launch, alone, tmp_path):
    url = f"--store=shm:{tmp_path / 'kv'}?size=16MiB"
    server, other = launch(url), launch(url)
    changes, told = [], server.worker.engine.allocator.on_change

    def changed(change):
        changes.append(change)
        told(change)

    server.worker.engine.allocator.on_change = changed  # where events and the store begin
    prompt = BEGUN + EDITED
    ask(server, DOCUMENT, **SEMANTIC)
    ask(server, [*BEGUN, 5])
    _, details = ask(server, prompt, **SEMANTIC)
    assert details["similar_tokens"] > 80 and details["cached_tokens"] == len(BEGUN)
    assert keeps(server, prompt) == [True, True] + [False] * (len(prompt) // BLOCK - 2)
    kept = {name for one in changes if isinstance(one, KeptBlocks) for name in one.names}
    assert kept.isdisjoint(mk.block_hashes(prompt, BLOCK).tolist()[2:])
    tokens = [one for change in changes for one in getattr(change, "token_ids", ())]
    assert tokens.count(EDITED[0]) == (DOCUMENT + BEGUN).count(EDITED[0])
    eventually(lambda: server.worker.stored._saving_bytes == 0)
    # All that the other one begins with is in the store.
    assert ask(other, prompt) == (alone(prompt), {"cached_tokens": len(BEGUN)})
    assert ask(server, prompt)[0] == alone(prompt)
    all_free(server, other)


def test_prompt_that_resembles_no_other_is_loaded_from_the_store(launch, alone, tmp_path):
    url = f"--store=shm:{tmp_path / 'kv'}?size=16MiB"
    first, second = launch(url), launch(url)
    ask(first, DOCUMENT)
    eventually(lambda: first.worker.stored._saving_bytes == 0)
    text, details = ask(second, DOCUMENT, **SEMANTIC)
    assert text == alone(DOCUMENT)
    assert details == {"cached_tokens": 99 // BLOCK * BLOCK, "similar_tokens": 0}
    assert ask(second, EDITED, **SEMANTIC)[1]["similar_tokens"] > 80  # it was kept, too
    all_free(first, second)


def test_exact_beginning_that_the_engine_has_dropped_comes_from_the_kept_prompt(launch, alone):
    server = launch("--num-blocks=24")
    ask(server, DOCUMENT, **SEMANTIC)
    for seed in (11, 12, 13):  # they need all of the cache
        ask(server, drawn(150, seed))
    assert not any(keeps(server, DOCUMENT))
    text, details = ask(server, [*DOCUMENT, 9, 9, 9], **SEMANTIC)
    assert text == alone([*DOCUMENT, 9, 9, 9])
    assert details == {"cached_tokens": 100, "similar_tokens": 0}


def test_prompt_is_handed_over_and_kept_nowhere(launch, alone):
    prefill, decode = launch("--role=prefill"), launch("--role=decode", blocks=0)
    handed = {"do_remote_decode": True}
    for prompt, kept in ((DOCUMENT, None), (EDITED, DOCUMENT)):
        for more in (SEMANTIC, {}):  # what was answered tells it, too
            answer = prefill.complete(prompt, 1, kv_transfer_params=handed, **SEMANTIC)
            params = answer.json()["kv_transfer_params"]
            text, details = ask(decode, prompt, kv_transfer_params=params, **more)
            assert text == alone(prompt, kept)
            if more:
                assert (details["similar_tokens"] > 80) == (kept is not None)
        assert all(keeps(decode, prompt)) == (kept is None)
    assert not any(keeps(decode, EDITED)) and not any(keeps(prefill, EDITED))
    assert ask(decode, EDITED) == (alone(EDITED), {"cached_tokens": 0})
    all_free(prefill, decode)


def test_prompt_of_which_nothing_is_told_counts_as_approximate(launch, alone):
    prefill, decode = launch("--role=prefill"), launch("--role=decode", blocks=0)
    handed = {"do_remote_decode": True}
    answer = prefill.complete(DOCUMENT, 1, kv_transfer_params=handed).json()
    params = answer["kv_transfer_params"]
    text, _ = ask(decode, DOCUMENT, kv_transfer_params=params, **SEMANTIC)
    assert text == alone(DOCUMENT) and not any(keeps(decode, DOCUMENT))


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("kv_reuse", {"kv_reuse": "semantic"}),
        ("kv_reuse", {"kv_reuse": "similar"}),
        ("kv_reuse", {"kv_reuse": ["semantic"]}),
    ],
)
@pytest.mark.parametrize("role", ["both", "decode"])
def test_engine_that_keeps_no_prompts_refuses_and_says_why(launch, role, param, body):
    server = launch(f"--role={role}", blocks=0)
    answer = server.complete(DOCUMENT, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param
    wanted = "--semantic-blocks" if body == SEMANTIC else "must be exact or semantic"
    assert wanted in error["message"]
    assert server.complete(DOCUMENT, 2, kv_reuse="exact").status_code == 200


@pytest.mark.parametrize("option", ["--pipeline=2", "--role=decode"])
def test_options_that_contradict_each_other_are_named(deep_folder, option):
    options = engine_options(deep_folder, "--semantic-blocks=4", option)
    with pytest.raises(InvalidArgument, match=r"--semantic-blocks must be 0 with --"):
        engine_command.run(options)


def test_serve_up_gives_the_option_to_engines_that_compute_prompts():
    parser = argparse.ArgumentParser()
    serve_options.add_commands(parser)
    options = parser.parse_args(["up", "--semantic-blocks=32"])
    arguments = up_command.engine_arguments(options, ["prefill", "decode"])
    assert "--semantic-blocks=32" in arguments["prefill"]
    assert "--semantic-blocks=0" in arguments["decode"]
    options = parser.parse_args(["up", "--semantic-blocks=32", "--pipeline=2"])
    with pytest.raises(InvalidArgument, match="--pipeline 2"):
        up_command.run(options)


def test_many_at_once_are_answered_as_one_after_the_other(launch, alone):
    server = launch("--num-blocks=64")  # not enough for all
    ask(server, DOCUMENT, **SEMANTIC)
    prompts = [drawn(3 + i, 20 + i) + DOCUMENT for i in range(4)]
    with ThreadPoolExecutor(8) as pool:
        similar = [pool.submit(ask, server, one, **SEMANTIC) for one in prompts]
        plain = [pool.submit(ask, server, one) for one in prompts]
        for prompt, answer, exact in zip(prompts, similar, plain, strict=True):
            assert answer.result()[0] == alone(prompt, DOCUMENT)
            assert exact.result() == (alone(prompt), {"cached_tokens": 0})
    eventually(lambda: server.num_free_blocks == 64)


def test_client_that_leaves_before_its_prompt_is_looked_up(launch, monkeypatch):
    server = launch()
    monkeypatch.setattr(server.worker.similar, "take", lambda: None)  # its turn never comes
    with pytest.raises(httpx.ReadTimeout):
        body = {"model": "tiny", "prompt": DOCUMENT, **SEMANTIC}
        server.client.post("/v1/completions", json=body, timeout=0.3)
    eventually(lambda: server.worker.counts.finished["abort"] == 1)
    all_free(server)
    monkeypatch.undo()
    assert ask(server, DOCUMENT, **SEMANTIC)[1]["similar_tokens"] == 0


def test_client_that_leaves_while_its_prompt_is_computed(launch, monkeypatch):
    server = launch()
    step = server.worker.engine.step
    monkeypatch.setattr(server.worker.engine, "step", list)  # nothing comes of it
    with pytest.raises(httpx.ReadTimeout):
        body = {"model": "tiny", "prompt": DOCUMENT, **SEMANTIC}
        server.client.post("/v1/completions", json=body, timeout=0.3)
    eventually(lambda: server.worker.counts.finished["abort"] == 1)
    monkeypatch.setattr(server.worker.engine, "step", step)
    all_free(server)
    assert len(server.worker.similar.cache) == 0


def test_not_finite_logits_fail_their_request_alone(launch, alone, monkeypatch):
    server = launch("--role=prefill")
    ask(server, DOCUMENT, **SEMANTIC)

    def fail(*_, **__):
        raise NotFinite("prefill_selected", [0])

    monkeypatch.setattr(server.worker.engine, "prefill_selected", fail)
    handed = {"kv_transfer_params": {"do_remote_decode": True}}
    for more in ({}, handed):
        failed = server.complete(EDITED, 1, **SEMANTIC, **more)
        assert failed.status_code == 500 and "finite" in failed.json()["error"]["message"]
    monkeypatch.undo()
    assert ask(server, EDITED, **SEMANTIC)[0] == alone(EDITED, DOCUMENT)
    all_free(server)


def test_prompt_that_is_too_long_to_be_kept_is_served(launch, alone):
    server = launch(blocks=4)
    assert ask(server, DOCUMENT, **SEMANTIC)[0] == alone(DOCUMENT)
    assert len(server.worker.similar.cache) == 0
    all_free(server)


@pytest.fixture
def router_of():
    """Starts routers in front of engines, by their names and roles."""
    made = []

    def started(**servers: tuple[str, EngineServer]) -> RouterServer:
        entries = [{"name": n, "role": r, "url": one.url} for n, (r, one) in servers.items()]
        config = {"connector": "mooncake_kernels", "block_size": BLOCK, "health_s": 0.05}
        made.append(RouterServer({"instance": entries, **config}))
        return made[-1]

    yield started
    for router in made:
        router.close()


def test_router_sends_such_requests_where_prompts_are_kept(launch, alone, router_of):
    plain, keeping = launch(blocks=0), launch()
    router = router_of(plain=("both", plain), keeping=("both", keeping))
    body = {"model": "tiny", "max_tokens": NUM_TOKENS, "temperature": 0, **SEMANTIC}
    texts = [
        router.client.post("/v1/completions", json={**body, "prompt": prompt}).json()
        for prompt in (DOCUMENT, EDITED, EDITED)
    ]
    want = [alone(DOCUMENT), *[alone(EDITED, DOCUMENT)] * 2]
    assert [one["choices"][0]["text"] for one in texts] == want
    assert plain.worker.counts.generated_tokens == 0
    [card] = router.get("/v1/models")["data"]
    assert card["kv_reuse"] == ["exact", "semantic"]
    assert router.instance("plain")["kv_reuse"] == ["exact"]
    assert router.instance("keeping")["kv_reuse"] == ["exact", "semantic"]


def test_router_hands_such_requests_over(launch, alone, router_of):
    prefill, decode = launch("--role=prefill"), launch("--role=decode", blocks=0)
    router = router_of(prefill=("prefill", prefill), decode=("decode", decode))
    body = {"model": "tiny", "max_tokens": NUM_TOKENS, "temperature": 0, **SEMANTIC}
    for prompt, kept in ((DOCUMENT, None), (EDITED, DOCUMENT)):
        answer = router.client.post("/v1/completions", json={**body, "prompt": prompt}).json()
        assert answer["choices"][0]["text"] == alone(prompt, kept)
        details = answer["usage"]["prompt_tokens_details"]
        assert (details["similar_tokens"] > 80) == (kept is not None)
    assert not any(keeps(decode, EDITED)) and not any(keeps(prefill, EDITED))


def test_router_without_engines_that_keep_prompts_says_so(launch, router_of):
    prefill, decode = launch("--role=prefill", blocks=0), launch("--role=decode", blocks=0)
    router = router_of(prefill=("prefill", prefill), decode=("decode", decode))
    body = {"model": "tiny", "prompt": DOCUMENT, "max_tokens": 4, **SEMANTIC}
    answer = router.client.post("/v1/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "kv_reuse")
    assert "--semantic-blocks" in error["message"]
    body["kv_reuse"] = "exact"
    assert router.client.post("/v1/completions", json=body).status_code == 200
