"""Cost models from the work of a model and the peak of a machine: no measurement is needed."""

import numbers
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InvalidArgument, check_at_least, shown
from .specs import MachineSpec, ModelSpec


def _check_share(op: str, name: str, value: float) -> None:
    if not isinstance(value, numbers.Real) or not 0 < float(value) <= 1:
        raise InvalidArgument(f"{op}: {name} must be in (0, 1], got {shown(value)}")


@dataclass(frozen=True, slots=True)
class Roofline:
    """The share of a machine's peak that is reached, for both models below.

    Attributes:
        model: the model that runs.
        machine: the machine it runs on.
        flops_share: of the machine's peak; 1 is the roofline itself, measured shares are lower.
        memory_share: of its memories' bandwidth.
        overhead_s: of each pass, whatever its size: launches, collectives, the scheduler.
    """

    model: ModelSpec
    machine: MachineSpec
    flops_share: float = 1.0
    memory_share: float = 1.0
    overhead_s: float = 0.0

    def __post_init__(self) -> None:
        """Check the shares, and that the model fits the machine."""
        _check_share("Roofline", "flops_share", self.flops_share)
        _check_share("Roofline", "memory_share", self.memory_share)
        check_at_least("Roofline", "overhead_s", self.overhead_s, 0)
        if self.model.weight_bytes >= self.machine.memory_bytes:
            raise InvalidArgument(
                f"Roofline: model must fit {self.machine.memory_bytes / 1e9:.0f} GB of memory, "
                f"got {self.model.weight_bytes / 1e9:.0f} GB of weights"
            )

    @property
    def capacity_tokens(self) -> int:
        """Tokens whose KV fits next to the weights."""
        free = self.machine.memory_bytes - self.model.weight_bytes
        return int(free // self.model.kv_bytes_per_token)

    def pass_seconds(self, flops: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
        """Return ``overhead + max(flops / peak, bytes / bandwidth)``."""
        compute = flops / (self.machine.flops * self.flops_share)
        memory = num_bytes / (self.machine.memory_bytes_per_s * self.memory_share)
        return self.overhead_s + np.maximum(compute, memory)


@dataclass(frozen=True, slots=True)
class RooflinePrefill:
    """Prefill by operations and bytes: causal attention is counted once per pair of tokens.

    With ``p`` cached tokens of ``n``::

        flops = 2 * layer_params * (n - p) + attention_flops_per_pair * (n**2 - p**2) / 2
        bytes = weights + kv_bytes_per_token * n

    Mooncake's paper (FAST'25, section 2.2) has ``layers * (4 n**2 d + 22 n d**2)``: it also counts
    the masked half, and a slightly smaller MLP.
    """

    roofline: Roofline

    def seconds(self, num_tokens: ArrayLike, prefix_tokens: ArrayLike) -> np.ndarray:
        """Predict the prefill of a prompt; see :class:`~.interface.PrefillCost`."""
        model = self.roofline.model
        n, p = np.asarray(num_tokens, float), np.asarray(prefix_tokens, float)
        pairs = (n**2 - p**2) / 2
        flops = 2.0 * model.num_layer_params * (n - p) + model.attention_flops_per_pair * pairs
        return self.roofline.pass_seconds(flops, model.weight_bytes + model.kv_bytes_per_token * n)


@dataclass(frozen=True, slots=True)
class RooflineDecode:
    """One decoding step by operations and bytes: weights and all KV are read once."""

    roofline: Roofline

    def seconds(self, batch_size: ArrayLike, kv_tokens: ArrayLike) -> np.ndarray:
        """Predict one step; see :class:`~.interface.DecodeCost`."""
        model = self.roofline.model
        requests, tokens = np.asarray(batch_size, float), np.asarray(kv_tokens, float)
        vocabulary = model.vocab_size * model.hidden_size
        flops = 2.0 * (model.num_layer_params + vocabulary) * requests
        flops = flops + model.attention_flops_per_pair * tokens
        num_bytes = model.weight_bytes + model.kv_bytes_per_token * tokens
        return self.roofline.pass_seconds(flops, num_bytes)
