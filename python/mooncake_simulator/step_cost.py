"""The duration of one step of an engine: a roofline with tiles."""

from dataclasses import dataclass, field
from math import sqrt

import numpy as np
from numpy.typing import ArrayLike

from .machines import Machine, Model

TILE_TOKENS = 128  # rows of a thread block's tile; SARATHI, section 4.3


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step that prefills chunks and decodes requests together.

    linear   = sqrt(weights read^2 + products of all tokens^2)   tokens rounded up to whole tiles
    prefill  = 4 * layers * hidden * pairs / attention flops     pairs: (query, key) under the mask
    decode   = KV bytes of all decoded requests / memory rate
    step     = linear + prefill + decode + the other costs of a step

    The two parts of ``linear`` overlap badly near the roofline's ridge. The root of squares is our
    choice, not fitted; with constants of SARATHI's Table 2 it gives 52, 71 and 94 ms for 128, 256
    and 257 tokens of LLaMA-13B on an A6000 where the paper measured 55, 69.8 and 92.3. A batch of
    up to one tile is not rounded: such products are bound by the weights anyway.

    Source: SARATHI (arXiv:2308.16369), sections 3.1 and 4; Mooncake (FAST'25), section 2.2.
    """

    model: Model
    machine: Machine
    _weights_s: float = field(init=False)
    _token_s: float = field(init=False)
    _pair_s: float = field(init=False)
    decode_token_s: float = field(init=False)

    def __post_init__(self) -> None:
        model, machine = self.model, self.machine
        memory = machine.memory_bytes_per_s * machine.memory_efficiency
        flops = machine.flops_per_s
        constants = {
            "_weights_s": model.weight_bytes / memory,
            "_token_s": 2 * model.num_params / (flops * machine.math_efficiency),
            "_pair_s": 4
            * model.num_layers
            * model.hidden_size
            / (flops * machine.attention_efficiency),
            "decode_token_s": model.kv_bytes_per_token / memory,
        }
        for name, value in constants.items():
            object.__setattr__(self, name, value)

    def linear_s(self, num_tokens: int) -> float:
        """Seconds of all matrix products of a step with this many tokens."""
        if num_tokens > TILE_TOKENS:
            num_tokens = -(-num_tokens // TILE_TOKENS) * TILE_TOKENS
        return sqrt(self._weights_s**2 + (num_tokens * self._token_s) ** 2)

    def attention_s(self, num_tokens: int, context_tokens: int) -> float:
        """Seconds of the attention of a chunk after ``context_tokens`` others."""
        return (num_tokens * context_tokens + num_tokens * (num_tokens + 1) / 2) * self._pair_s

    def decode_s(self, batch_size: int, kv_tokens: float) -> float:
        """Seconds of a step that only decodes; it is linear in ``kv_tokens``."""
        return self.linear_s(batch_size) + kv_tokens * self.decode_token_s + self.machine.step_s

    def seconds(self, batch_size: ArrayLike, kv_tokens: ArrayLike) -> np.ndarray:
        """Get the same of many steps at once, for the conductor: its ``DecodeCost``."""
        rows = np.asarray(batch_size, float)
        rows = np.where(rows > TILE_TOKENS, np.ceil(rows / TILE_TOKENS) * TILE_TOKENS, rows)
        linear_s = np.sqrt(self._weights_s**2 + (rows * self._token_s) ** 2)
        tokens_s = np.asarray(kv_tokens, float) * self.decode_token_s
        return linear_s + tokens_s + self.machine.step_s

    def mixed_s(
        self, chunks: list[tuple[int, int]], batch_size: int = 0, kv_tokens: float = 0
    ) -> float:
        """Seconds of a step of chunks (tokens, context tokens) and decodes together."""
        num_tokens = batch_size + sum(tokens for tokens, _ in chunks)
        seconds = self.linear_s(num_tokens) + self.machine.step_s
        for tokens, context in chunks:
            seconds += self.attention_s(tokens, context)
        return seconds + kv_tokens * self.decode_token_s

    def prefill_s(self, num_tokens: int, prefix_tokens: int, chunk_tokens: int) -> float:
        """Seconds of a prompt in chunks, its first ``prefix_tokens`` reused."""
        return sum(self.chunks_s(num_tokens, prefix_tokens, chunk_tokens))

    def chunks_s(self, num_tokens: int, prefix_tokens: int, chunk_tokens: int) -> list[float]:
        """Seconds of each chunk of a prompt; at least one token is always computed."""
        context = min(prefix_tokens, num_tokens - 1)
        chunks = []
        while context < num_tokens:
            tokens = min(chunk_tokens, num_tokens - context)
            chunks.append(
                self.linear_s(tokens) + self.attention_s(tokens, context) + self.machine.step_s
            )
            context += tokens
        return chunks
