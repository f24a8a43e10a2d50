"""The forward pass of a Llama-family model over a paged KV cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from .attention import Attention, attention_of
from .batch import Batch
from .config import ModelConfig
from .kv_cache import PagedKVCache
from .rope import rotate, rotation
from .weights import LayerWeights, Weights

INVARIANT_ROWS = 16  # from here on MKL rounds a row the same for any number of rows


@dataclass(frozen=True)
class LayerHooks:
    """Two moments of each layer, for KV that arrives or leaves while the layers run.

    On CUDA both are called when the work is queued, not when it is done.
    """

    before_attention: Callable[[int], None] | None = None  # last moment for older KV to arrive
    after_write: Callable[[int], None] | None = None  # the batch's own KV is in the cache


class Llama:
    """Compute logits of a mixed batch, reading and writing keys and values in a paged cache.

    Guarantees about rounding: on the CPU, attention depends neither on neighbours nor on the chunks
    of a prompt; the matrix products are over all tokens of the batch, and a BLAS may round a row
    differently for different numbers of rows. Logits then move by about 1e-5 in float32, and a
    greedy token changes only where two logits are that close. ``batch_invariant`` pads those
    products to a multiple of 16 rows, after which the results with and without neighbours were
    bitwise equal on the x86 CPUs (MKL) we measured, at about 1.5 to 2 times the cost of a lone
    float32 decode. In neither mode are a prompt in different chunks, or a GPU's decodes with
    different neighbours, bitwise equal: those agree to rounding.

    Args:
        config: the model's numbers.
        weights: its tensors; they decide dtype and device.
        batch_invariant: see above.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, *, batch_invariant: bool = False
    ) -> None:
        self.config, self.weights = config, weights
        self.dtype, self.device = weights.embedding.dtype, weights.embedding.device
        self._row_multiple = INVARIANT_ROWS if batch_invariant else 1

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        cache: PagedKVCache,
        *,
        requests: Sequence[int] | None = None,
        all_logits: bool = False,
        hooks: LayerHooks | None = None,
        attention: Attention | None = None,
    ) -> torch.Tensor:
        """Run one step: write the batch's keys and values, return logits.

        Args:
            batch: tokens, positions and blocks, on the model's device.
            cache: of the same config, dtype and device; written at ``batch.slots`` only.
            requests: indices of the requests whose last token's logits are wanted; None: all.
            all_logits: logits of every token of the batch instead.
            hooks: called around each layer.
            attention: of this step; None: over this cache alone.

        Returns:
            ``[len(requests), vocab_size]``, or ``[num_tokens, vocab_size]``; the model's dtype.
            On CUDA the work is queued on the current stream.
        """
        attention = attention or attention_of(batch)
        cos_sin = rotation(batch.positions, self.weights.frequencies, self.dtype)
        x = self.weights.embedding[batch.token_ids]
        hooks = hooks or LayerHooks()
        for layer_index, layer in enumerate(self.weights.layers):
            q, k, v = self.project(layer, x, cos_sin)
            if hooks.before_attention:
                hooks.before_attention(layer_index)
            k_cache, v_cache = cache.layer(layer_index)
            attention.append(k, v, k_cache, v_cache)
            if hooks.after_write:
                hooks.after_write(layer_index)
            attended = attention.attend(q, k_cache, v_cache)
            x = self.complete_layer(layer, x, attended)
        if not all_logits:
            x = x[self._last_rows(batch, requests)]
        return self.to_logits(x)

    def project(
        self,
        layer: LayerWeights,
        x: torch.Tensor,
        cos_sin: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute q, k, v ``[num_tokens, heads, head_dim]``, q and k rotated."""
        config = self.config
        qkv = self._linear(self._norm(x, layer.attention_norm), layer.qkv)
        qkv = qkv.view(x.shape[0], -1, config.head_dim)
        heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        q, k, v = torch.split(qkv, heads, dim=1)
        return rotate(q, *cos_sin), rotate(k, *cos_sin), v

    def complete_layer(
        self, layer: LayerWeights, x: torch.Tensor, attended: torch.Tensor
    ) -> torch.Tensor:
        """Add what a layer's attention and feed-forward contribute to the hidden states.

        Args:
            layer: the weights.
            x: ``[num_tokens, hidden_size]``, the layer's input.
            attended: ``[num_tokens, num_heads, head_dim]``, of the same tokens.
        """
        x = x + self._linear(attended.flatten(1), layer.attention_out)
        return x + self._feed_forward(layer, x)

    def to_logits(self, x: torch.Tensor) -> torch.Tensor:
        """Compute logits ``[num_tokens, vocab_size]`` from the last layer's hidden states."""
        return self._linear(self._norm(x, self.weights.norm), self.weights.head)

    def _feed_forward(self, layer: LayerWeights, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._linear(self._norm(x, layer.ffn_norm), layer.gate_up).chunk(2, dim=-1)
        return self._linear(functional.silu(gate) * up, layer.down)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.rms_eps)
        return wide.to(x.dtype) * weight

    def _linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        num_rows = x.shape[0]
        padding = -num_rows % self._row_multiple
        if padding:
            x = functional.pad(x, (0, 0, 0, padding))
        return functional.linear(x, weight)[:num_rows]

    def _last_rows(self, batch: Batch, requests: Sequence[int] | None) -> torch.Tensor:
        ends = batch.row_starts[1:]
        wanted = range(len(ends)) if requests is None else requests
        return torch.tensor([ends[i] - 1 for i in wanted], dtype=torch.int64, device=self.device)
