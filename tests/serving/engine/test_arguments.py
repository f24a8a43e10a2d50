"""A wrong argument is an InvalidArgument, and a missing package names its extra."""

import sys

import pytest
import torch

from mooncake_kernels import InvalidArgument
from mooncake_serving.dist_attention.engine import Job
from mooncake_serving.engine import (
    Batch,
    Engine,
    PagedKVCache,
    SamplingParams,
    SemanticCache,
    load_model,
)
from mooncake_serving.engine.chat import render_chat
from mooncake_serving.engine.sampling import sample
from mooncake_serving.semantic import Recompute, SignatureIndex
from tests.progress import run_to_its_end


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.add_request([]),
        lambda engine: engine.generate([["a"]]),
        lambda engine: engine.prefill([5], num_cached_tokens=3),
        lambda engine: engine.reserve(0),
        lambda engine: engine.release([0]),
        lambda engine: engine.allocator.free([0]),
        lambda engine: PagedKVCache(engine.model.config, 4, axes="dim"),
        lambda engine: PagedKVCache(engine.model.config, 4, buffer=torch.zeros(1)),
        lambda engine: SamplingParams(top_k=-1),
        lambda engine: SemanticCache(engine, 0),
        lambda engine: Batch.build([], 8, "cpu"),
        lambda engine: Job([], SamplingParams()),
        lambda engine: Recompute(share=2),
        lambda engine: SignatureIndex(7),
        lambda engine: load_model(dtype=torch.int8),
        lambda engine: render_chat("{{", [], reply=True, bos_token="", eos_token=""),
        lambda engine: sample(torch.zeros(1, 2), []),
    ],
)
def test_bad_arguments_raise_invalid_argument(call, make_engine):
    with pytest.raises(InvalidArgument):
        call(make_engine())


def test_busy_engine_raises_invalid_argument(make_engine):
    engine = make_engine()
    stream = engine.stream([[5]])
    next(stream)
    with pytest.raises(InvalidArgument, match="^step: the engine's stream must be finished"):
        engine.step()
    stream.close()
    engine.add_request([5])
    with pytest.raises(InvalidArgument, match="^generate: the engine must be idle, got 1 "):
        engine.generate([[5]])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda engine: Engine(engine.cache, engine.model), "Engine: model must be a Llama, got "),
        (lambda engine: Engine(engine.model, 4), "Engine: cache must be a PagedKVCache, got 4"),
        (lambda engine: PagedKVCache(None, 4), "PagedKVCache: config must be a ModelConfig, got "),
        (lambda engine: load_model(5), "load_model: path must be a path or None, got 5"),
    ],
)
def test_object_of_another_class_is_rejected(call, message, make_engine):
    with pytest.raises(InvalidArgument, match=f"^{message}"):
        call(make_engine())


@pytest.mark.parametrize(
    "package, module",
    [
        ("gguf", "engine"),
        ("jinja2", "engine"),
        ("msgspec", "dist_attention"),
        ("safetensors", "engine"),
        ("tokenizers", "engine"),
    ],
)
def test_a_missing_package_names_its_extra(package, module):
    code = f"""
import sys
sys.modules[{package!r}] = None
try:
    import mooncake_serving.dist_attention.engine
except ImportError as error:
    print(error.name, error)
"""
    ran = run_to_its_end([sys.executable, "-c", code])
    name, _, message = ran.stdout.partition(" ")
    assert name.partition(".")[0] == package, ran.stderr
    wanted = f"mooncake_serving.{module}: {package} is not installed: pip install "
    assert message.startswith(wanted) and message.endswith("'mooncake-kernels[serving]'\n")
