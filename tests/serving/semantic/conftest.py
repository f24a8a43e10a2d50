"""A random Llama of five layers: of two, all keys and values would be computed from the tokens."""

import dataclasses

import pytest
import torch

from mooncake_serving.engine import Engine, Llama, PagedKVCache
from mooncake_serving.engine.weights import LayerWeights

NUM_LAYERS = 5


def random_like(weights: LayerWeights, generator: torch.Generator) -> LayerWeights:
    def draw(tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=generator)
        return 0.2 * noise if tensor.dim() == 2 else 1 + 0.1 * noise

    return LayerWeights(*(draw(getattr(weights, f.name)) for f in dataclasses.fields(weights)))


@pytest.fixture(scope="session")
def deep(tiny):
    generator = torch.Generator().manual_seed(7)
    layers = tuple(random_like(tiny.weights.layers[0], generator) for _ in range(NUM_LAYERS))
    config = dataclasses.replace(tiny.config, num_layers=NUM_LAYERS)
    return Llama(config, dataclasses.replace(tiny.weights, layers=layers))


@pytest.fixture
def deep_engine(deep):
    """Build an engine on it: ``deep_engine(num_blocks=.., block_size=.., axes=..)``."""

    def make(num_blocks=64, block_size=8, axes="kv block token head dim", **limits):
        cache = PagedKVCache(deep.config, num_blocks, block_size=block_size, axes=axes)
        return Engine(deep, cache, **limits)

    return make


@pytest.fixture
def draw(deep):
    """Draw random tokens: ``draw(60, seed=1)``."""

    def tokens(count, seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, deep.config.vocab_size, (count,), generator=generator).tolist()

    return tokens
