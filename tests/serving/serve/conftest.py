import contextlib

import pytest

from mooncake_serving.engine import Engine, PagedKVCache, SamplingParams, load_model
from tests.serving.serve.support import EngineServer


@pytest.fixture
def start(tiny_folder):
    """Starts engine servers of the tiny model, with options; they end with the test."""
    with contextlib.ExitStack() as stack:

        def started(*more: str, events: bool = False) -> EngineServer:
            server = EngineServer(tiny_folder, *more, events=events)
            stack.callback(server.close)
            return server

        yield started


@pytest.fixture(scope="session")
def expected(tiny_folder):
    """What one engine alone answers to a prompt: its text and its number of tokens."""
    model, tokenizer = load_model(tiny_folder, batch_invariant=True)

    def answer(prompt: str | list[int], max_tokens: int = 8, **more) -> tuple[str, int]:
        tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        engine = Engine(model, PagedKVCache(model.config, 64, block_size=8))
        [done] = engine.generate([tokens], SamplingParams(max_tokens=max_tokens, **more))
        ids = done.token_ids if done.finish_reason == "length" else done.token_ids[:-1]
        return tokenizer.decode(ids), len(done.token_ids)

    return answer
