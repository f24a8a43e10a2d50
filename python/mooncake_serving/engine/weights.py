"""The tensors of a model, laid out for the forward pass and checked on loading."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import torch

from .config import ModelConfig
from .errors import InvalidModel, UnsupportedModel
from .rope import inverse_frequencies

Progress = Callable[[int, int, str], None]  # done, total, name of what was just loaded

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Hold one decoder layer; matrices are ``[out, in]``."""

    attention_norm: torch.Tensor  # [hidden_size]
    qkv: torch.Tensor  # [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    attention_out: torch.Tensor  # [hidden_size, num_heads * head_dim]
    ffn_norm: torch.Tensor  # [hidden_size]
    gate_up: torch.Tensor  # [2 * ffn_size, hidden_size]
    down: torch.Tensor  # [hidden_size, ffn_size]


@dataclass(frozen=True, slots=True)
class Weights:
    """Hold a model, all of one dtype and device except the float32 frequencies.

    Of some layers alone, the embedding is empty without the first of the model, the head without
    the last.
    """

    embedding: torch.Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor  # [hidden_size]
    head: torch.Tensor  # [vocab_size, hidden_size]; the embedding itself if tied
    frequencies: torch.Tensor  # [head_dim / 2] float32

    def part(self, layers: range) -> "Weights":
        """Return what some layers of a whole model need."""
        nothing = self.embedding.new_empty(0)
        return Weights(
            embedding=self.embedding if layers.start == 0 else nothing,
            layers=self.layers[layers.start : layers.stop],
            norm=self.norm,
            head=self.head if layers.stop == len(self.layers) else nothing,
            frequencies=self.frequencies,
        )


class TensorSource(Protocol):
    """Anything that finds tensors by their Hugging Face names."""

    @property
    def names(self) -> Collection[str]:
        """All tensors of the source."""

    @property
    def rope_factors(self) -> torch.Tensor | None:
        """Divisors of the rotary frequencies, ``[head_dim / 2]``, if any."""

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor, which is in ``names``; the result may alias the source."""


def build_weights(
    source: TensorSource,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Progress | None = None,
    layers: range | None = None,
) -> Weights:
    """Read a model's tensors, fuse q/k/v and gate/up, convert and place them.

    Args:
        source: where the tensors are.
        config: gives the required shapes.
        dtype: of the result.
        device: of the result.
        progress: called after the embedding, each layer and the head.
        layers: read what these need and nothing else, see ``Weights``; None: all.

    Raises:
        InvalidModel: a tensor is missing or has another shape.
        UnsupportedModel: the source holds a tensor that the forward pass would ignore, such as a
            bias, a query norm or an expert.
    """
    loader = _Loader(source, dtype, device)
    own = range(config.num_layers) if layers is None else layers
    total = len(own) + 2

    def report(done: int, name: str) -> None:
        if progress is not None:
            progress(done, total, name)

    matrix = (config.vocab_size, config.hidden_size)
    nothing = torch.empty(0, dtype=dtype, device=device)
    embedding = loader(EMBEDDING, *matrix) if own.start == 0 else nothing
    report(1, EMBEDDING)
    read = []
    for done, layer_index in enumerate(own, 2):
        read.append(_read_layer(loader, config, f"model.layers.{layer_index}."))
        report(done, f"model.layers.{layer_index}")
    norm, head = loader(NORM, config.hidden_size), nothing
    if own.stop == config.num_layers:
        if config.tie_embeddings:
            head = embedding if own.start == 0 else loader(EMBEDDING, *matrix)
        else:
            head = loader(HEAD, *matrix)
    if layers is None:
        loader.refuse_leftovers(config)
    frequencies = inverse_frequencies(config, source.rope_factors).to(device)
    report(total, HEAD)
    return Weights(embedding, tuple(read), norm, head, frequencies)


def _read_layer(loader: "_Loader", config: ModelConfig, prefix: str) -> LayerWeights:
    hidden, ffn = config.hidden_size, config.ffn_size
    q_size, kv_size = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))

    def read(name: str, *shape: int) -> torch.Tensor:
        return loader(f"{prefix}{name}.weight", *shape)

    qkv = [
        read(f"self_attn.{x}_proj", n, hidden)
        for x, n in zip("qkv", (q_size, kv_size, kv_size), strict=True)
    ]
    gate_up = [read(f"mlp.{x}_proj", ffn, hidden) for x in ("gate", "up")]
    return LayerWeights(
        attention_norm=read("input_layernorm", hidden),
        qkv=torch.cat(qkv),
        attention_out=read("self_attn.o_proj", hidden, q_size),
        ffn_norm=read("post_attention_layernorm", hidden),
        gate_up=torch.cat(gate_up),
        down=read("mlp.down_proj", hidden, ffn),
    )


class _Loader:
    """Reads tensors, checks their shapes and remembers which were requested."""

    def __init__(
        self, source: TensorSource, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.source, self.dtype, self.device = source, dtype, device
        self.used: set[str] = set()

    def __call__(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self.source.names:
            raise InvalidModel(f"load_model: tensor {name} is missing")
        self.used.add(name)
        tensor = self.source.read(name)
        if tuple(tensor.shape) != shape:
            raise InvalidModel(
                f"load_model: tensor {name} must be {list(shape)}, got {list(tensor.shape)}"
            )
        return tensor.to(self.device, self.dtype, copy=True)

    def refuse_leftovers(self, config: ModelConfig) -> None:
        ignored = {HEAD} if config.tie_embeddings else set()
        left = sorted(set(self.source.names) - self.used - ignored)
        left = [name for name in left if not name.endswith("rotary_emb.inv_freq")]
        if left:
            raise UnsupportedModel(
                f"load_model: {len(left)} tensors have no place in a plain Llama, "
                f"first {', '.join(left[:3])}"
            )
