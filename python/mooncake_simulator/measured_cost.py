"""The duration of what an instance does, by models that were fitted to measurements."""

from dataclasses import dataclass
from typing import Protocol

from mooncake_serving.conductor import LinearDecode, PrefillCost

from .machines import Machine, Model

FAST = 1e18  # of whatever takes no time


class InstanceCost(Protocol):
    """What a simulated instance asks for; also :class:`~.step_cost.StepCost`.

    Attributes:
        model, machine: what it runs, and on what.
        decode_token_s: what a step takes longer for a further token in its requests.
    """

    @property
    def model(self) -> Model: ...

    @property
    def machine(self) -> Machine: ...

    @property
    def decode_token_s(self) -> float: ...

    def decode_s(self, batch_size: int, kv_tokens: float) -> float:
        """Seconds of a step that only decodes; it is linear in ``kv_tokens``."""
        ...

    def chunks_s(self, num_tokens: int, prefix_tokens: int, chunk_tokens: int) -> list[float]:
        """Seconds of each chunk of a prompt; at least one token is always computed."""
        ...


@dataclass(frozen=True)
class MeasuredCost:
    """Prefills and steps as fitted; a prompt is one chunk, and moving KV takes no time.

    Attributes:
        prefill: of a whole prompt.
        decode: of a step.
        capacity_tokens: whose KV an instance holds.
    """

    prefill: PrefillCost
    decode: LinearDecode
    capacity_tokens: int

    @property
    def model(self) -> Model:
        """One whose KV takes 4 bytes a token, beside weights that take none."""
        return Model("measured", 0.0, num_layers=1, hidden_size=1, kv_hidden_size=1)

    @property
    def machine(self) -> Machine:
        """One whose memory is the KV cache."""
        return Machine(
            "measured",
            flops_per_s=FAST,
            memory_bytes_per_s=FAST,
            memory_bytes=self.capacity_tokens * self.model.kv_bytes_per_token,
            math_efficiency=1.0,
            attention_efficiency=1.0,
            memory_efficiency=1.0,
            host_bytes_per_s=FAST,
            nic_bytes_per_s=FAST,
            memory_share=1.0,
        )

    @property
    def decode_token_s(self) -> float:
        """What a step takes longer for a further token in its requests."""
        return self.decode.per_kv_token_s

    def decode_s(self, batch_size: int, kv_tokens: float) -> float:
        """Seconds of a step that only decodes."""
        return float(self.decode.seconds(batch_size, kv_tokens))

    def chunks_s(self, num_tokens: int, prefix_tokens: int, chunk_tokens: int) -> list[float]:
        """Seconds of a prompt, in one; at least one token is computed."""
        return [float(self.prefill.seconds(num_tokens, min(prefix_tokens, num_tokens - 1)))]
