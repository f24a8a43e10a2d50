"""The numbers that define a Llama-family model, whatever file they were read from."""

from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from mooncake_kernels.errors import shown

from .errors import InvalidModel

MAX_SIZE = 2**31 - 1  # of anything that a model has a number of
MAX_NUMBER = 1e300  # a larger integer is infinite as a float


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How a model stretches its rotary frequencies to contexts longer than it was trained for.

    ``linear`` divides every frequency by ``factor``. ``llama3`` divides only the slow ones, and
    blends between ``low_freq_factor`` and ``high_freq_factor`` turns of the original context.

    Raises:
        InvalidModel: a number with which frequencies are not finite; the message names it.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        """Check that every number is positive and that there is something to blend between."""
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            _check_number(self, name)
        _check_size(self, "original_max_position")
        if not self.low_freq_factor < self.high_freq_factor:
            raise InvalidModel(
                "RopeScaling: low_freq_factor must be less than high_freq_factor, "
                f"got {self.low_freq_factor} and {self.high_freq_factor}"
            )


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
        """Check that every size is positive, that the heads divide, and the types."""
        for name in ("num_layers", "hidden_size", "ffn_size", "num_heads", "num_kv_heads"):
            _check_size(self, name)
        for name in ("head_dim", "vocab_size", "max_position"):
            _check_size(self, name)
        for name in ("rms_eps", "rope_theta"):
            _check_number(self, name)
        if not isinstance(self.tie_embeddings, bool):
            _refuse(self, "tie_embeddings", "True or False", self.tie_embeddings)
        if not all(is_integer(token_id) for token_id in self.eos_token_ids):
            _refuse(self, "eos_token_ids", "integers", self.eos_token_ids)
        if self.num_heads % self.num_kv_heads:
            raise InvalidModel(
                f"ModelConfig: num_heads must be a multiple of num_kv_heads, "
                f"got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise InvalidModel(f"ModelConfig: head_dim must be even, got {self.head_dim}")


def is_integer(value: Any) -> bool:
    """Tell whether a value out of a file is an integer; true and false are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def _check_size(config: Any, name: str) -> None:
    value = getattr(config, name)
    if not is_integer(value):
        _refuse(config, name, "an integer", value)
    if value < 1:
        _refuse(config, name, "positive", value)
    if value > MAX_SIZE:
        _refuse(config, name, f"at most {MAX_SIZE}", value)


def _check_number(config: Any, name: str) -> None:
    value = getattr(config, name)
    if not is_integer(value) and not isinstance(value, float):
        _refuse(config, name, "a number", value)
    if not 0 < value < MAX_NUMBER:
        _refuse(config, name, "positive and finite", value)


def _refuse(config: Any, name: str, wanted: str, value: Any) -> NoReturn:
    raise InvalidModel(f"{type(config).__name__}: {name} must be {wanted}, got {shown(value)}")
