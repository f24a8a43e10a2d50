"""The numbers that define a Llama-family model, whatever file they were read from."""

from dataclasses import dataclass
from typing import Literal

from .errors import InvalidModel


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How a model stretches its rotary frequencies to contexts longer than it was trained for.

    ``linear`` divides every frequency by ``factor``. ``llama3`` divides only the slow ones, and
    blends between ``low_freq_factor`` and ``high_freq_factor`` turns of the original context.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Describe a decoder of the Llama family: RMSNorm, rotary GQA attention, SwiGLU, no biases.

    Raises:
        InvalidModel: numbers that cannot belong together; the message names them.
    """

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int  # the longest context, in tokens
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False  # the output head is the embedding
    eos_token_ids: tuple[int, ...] = ()  # any of them ends a generation

    def __post_init__(self) -> None:
        """Check that every size is positive and that the heads divide."""
        for name in ("num_layers", "hidden_size", "ffn_size", "num_heads", "num_kv_heads"):
            _check_positive(name, getattr(self, name))
        for name in ("head_dim", "vocab_size", "max_position", "rms_eps", "rope_theta"):
            _check_positive(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise InvalidModel(
                f"ModelConfig: num_heads must be a multiple of num_kv_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise InvalidModel(f"ModelConfig: head_dim must be even, got {self.head_dim}")


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise InvalidModel(f"ModelConfig: {name} must be positive, got {value}")
