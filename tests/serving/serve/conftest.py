import contextlib

import pytest

from mooncake_serving.engine import (
    Engine,
    Generation,
    PagedKVCache,
    SamplingParams,
    Tokenizer,
    load_model,
)
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
def alone(tiny_folder):
    """What one engine alone generates from a prompt; and that prompt's tokens."""
    model, tokenizer = load_model(tiny_folder, batch_invariant=True)

    def generate(
        prompt: str | list[int], max_tokens: int, **more
    ) -> tuple[list[int], Generation, Tokenizer]:
        tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        engine = Engine(model, PagedKVCache(model.config, 64, block_size=8))
        [done] = engine.generate([tokens], SamplingParams(max_tokens=max_tokens, **more))
        return tokens, done, tokenizer

    return generate


@pytest.fixture(scope="session")
def expected(alone):
    """The text of that, and its number of tokens."""

    def answer(prompt: str | list[int], max_tokens: int = 8, **more) -> tuple[str, int]:
        _, done, tokenizer = alone(prompt, max_tokens, **more)
        ids = done.token_ids if done.finish_reason == "length" else done.token_ids[:-1]
        return tokenizer.decode(ids), len(done.token_ids)

    return answer
