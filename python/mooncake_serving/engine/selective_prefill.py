"""Prefill over keys and values that are nearly right: only tokens that deviate are recomputed."""

import dataclasses
import time
from dataclasses import dataclass

import torch

from mooncake_serving.semantic import Recompute, deviations, rows_by_layer

from .attention import Attention, attention_of
from .batch import Batch
from .errors import NotFinite
from .kv_cache import PagedKVCache
from .llama import Llama
from .request import PrefillChunk, Prefilled, Request
from .rope import rotation
from .sampling import sample


def run_selective_prefill(
    model: Llama,
    cache: PagedKVCache,
    request: Request,
    is_reused: torch.Tensor,
    recompute: Recompute,
) -> tuple[Prefilled, tuple[int, ...]]:
    """Compute the pending tokens of a prompt over reused keys and values, in one pass.

    Args:
        model: the model.
        cache: which has ``request.block_ids``.
        request: its tokens are the prompt; ``num_computed`` of them have exact keys and values.
        is_reused: bool ``[num_pending]``: which of the others have some to reuse in their slots.
        recompute: which of these are recomputed in which layer.

    Returns:
        What ``run_prefill`` does, and how many tokens had keys and values computed in each layer.
    """
    began = time.perf_counter()
    start, num_tokens = request.num_computed, request.num_prompt_tokens
    chunk = request.next_chunk(request.num_pending)
    batch = Batch.build([chunk], cache.block_size, model.device)
    logits, num_rows = forward_selected(model, cache, batch, is_reused, recompute)
    try:
        [first_token] = sample(logits, [request.next_draw()])
    except NotFinite:
        raise NotFinite("prefill_selected", [request.request_id]) from None
    request.num_computed = num_tokens
    seconds = time.perf_counter() - began
    block_ids = request.block_ids
    done = PrefillChunk(start, num_tokens, num_tokens, seconds, tuple(block_ids))
    return Prefilled(first_token, list(block_ids), num_tokens, start, (done,)), num_rows


@torch.inference_mode()
def forward_selected(
    model: Llama,
    cache: PagedKVCache,
    batch: Batch,
    is_reused: torch.Tensor,
    recompute: Recompute,
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Run a forward pass that drops tokens on the way and leaves them their reused KV.

    Equivalent to::

        rows = all tokens of the batch
        for layer in layers:
            write the keys and values of rows over the reused ones
            if layer >= full_layers:
                rows = rows_by_layer[layer]        # chosen at full_layers, by deviation
            rows attend to all tokens up to their own, and go through the feed-forward

    Args:
        model: the model.
        cache: holds exact keys and values before the batch's tokens, and reused ones for them.
        batch: one request's last tokens.
        is_reused: bool ``[num_tokens]``: tokens whose slots hold reused keys and values.
        recompute: how many of them go how deep.

    Returns:
        The last token's logits ``[1, vocab_size]``, and how many tokens' keys and values each
        layer computed.
    """
    rows = torch.arange(len(batch.token_ids), device=model.device)
    live = _Live.of(model, batch, rows)
    plan: list[torch.Tensor] | None = None
    x, num_rows = model.weights.embedding[batch.token_ids], []
    for layer_index, layer in enumerate(model.weights.layers):
        q, k, v = model.project(layer, x, live.cos_sin)
        k_cache, v_cache = cache.layer(layer_index)
        if layer_index == recompute.full_layers:
            reused = (_at_slots(part, batch) for part in (k_cache, v_cache))
            num_layers = len(model.weights.layers)
            plan = rows_by_layer(deviations(k, v, *reused), is_reused, num_layers, recompute)
        live.attention.append(k, v, k_cache, v_cache)
        num_rows.append(len(x))
        if plan is not None and len(plan[layer_index]) < len(live.rows):
            going_on = torch.searchsorted(live.rows, plan[layer_index])
            live = _Live.of(model, batch, plan[layer_index])
            q, x = q[going_on], x[going_on]
        x = model.complete_layer(layer, x, live.attention.attend(q, k_cache, v_cache))
    return model.to_logits(x[-1:]), tuple(num_rows)


@dataclass(frozen=True)
class _Live:
    """The tokens that go through a layer, and what is made once for them."""

    rows: torch.Tensor  # ascending indices into the batch
    attention: Attention
    cos_sin: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, model: Llama, batch: Batch, rows: torch.Tensor) -> "_Live":
        chosen = selected(batch, rows)
        cos_sin = rotation(chosen.positions, model.weights.frequencies, model.dtype)
        return cls(rows, attention_of(chosen, selected=True), cos_sin)


def selected(batch: Batch, rows: torch.Tensor) -> Batch:
    """Return a batch of one request's tokens with only some of its rows, ascending."""
    return dataclasses.replace(
        batch,
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        slots=batch.slots[rows],
        q_lens=(len(rows),),
    )


def _at_slots(cache: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Read ``[num_tokens, num_kv_heads, head_dim]`` of one layer's keys or values."""
    return cache[batch.slots // batch.block_size, batch.slots % batch.block_size]
