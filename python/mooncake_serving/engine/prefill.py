"""Prefill of a prompt into blocks, chunk by chunk: a prefill worker's half of serving."""

import operator
import time
from collections.abc import Callable, Sequence

from mooncake_kernels.errors import InvalidArgument, shown

from .batch import Batch
from .errors import NotFinite
from .kv_cache import PagedKVCache
from .llama import LayerHooks, Llama
from .request import PrefillChunk, Prefilled, Request
from .sampling import sample

OnChunk = Callable[[PrefillChunk], None]


def run_prefill(
    model: Llama,
    cache: PagedKVCache,
    request: Request,
    *,
    chunk_tokens: int,
    on_chunk: OnChunk | None = None,
    hooks: LayerHooks | None = None,
) -> Prefilled:
    """Compute the pending tokens of one prompt and choose the token that follows.

    Args:
        model: the model.
        cache: which has ``request.block_ids``.
        request: its tokens are the prompt; ``num_computed`` of them are in the cache already.
        chunk_tokens: tokens of one forward pass.
        on_chunk: called after each chunk, when its keys and values may be sent.
        hooks: called around every layer of every chunk.
    """
    num_tokens, num_cached = request.num_prompt_tokens, request.num_computed
    chunks: list[PrefillChunk] = []
    first_token = -1
    while request.num_pending:
        began = time.perf_counter()
        start = request.num_computed
        chunk = request.next_chunk(min(chunk_tokens, request.num_pending))
        is_last = start + len(chunk.token_ids) == num_tokens
        batch = Batch.build([chunk], cache.block_size, model.device)
        logits = model.forward(batch, cache, requests=[0] if is_last else [], hooks=hooks)
        if is_last:
            try:
                [first_token] = sample(logits, [request.next_draw()])
            except NotFinite:
                raise NotFinite("prefill", [request.request_id]) from None
        request.num_computed += len(chunk.token_ids)
        seconds = time.perf_counter() - began
        chunks.append(
            PrefillChunk(start, request.num_computed, num_tokens, seconds, tuple(chunk.block_ids))
        )
        if on_chunk is not None:
            on_chunk(chunks[-1])
    return Prefilled(first_token, list(request.block_ids), num_tokens, num_cached, tuple(chunks))


def check_prompt(op: str, prompt_tokens: Sequence[int], model: Llama) -> list[int]:
    """Check that a prompt is not empty, leaves room for one token and names known tokens.

    Raises:
        InvalidArgument: the check fails; the message begins with ``op``.
    """
    try:
        listed = list(prompt_tokens)  # once: it may be an iterator
        if bool in map(type, listed):
            raise TypeError
        tokens = [operator.index(token_id) for token_id in listed]
    except TypeError:
        raise InvalidArgument(
            f"{op}: prompt_tokens must be integers, got {shown(prompt_tokens)}"
        ) from None
    config = model.config
    if not tokens:
        raise InvalidArgument(f"{op}: prompt_tokens must not be empty, got []")
    if len(tokens) >= config.max_position:
        raise InvalidArgument(
            f"{op}: prompt_tokens must be shorter than the model's context of "
            f"{config.max_position} tokens, got {len(tokens)}"
        )
    if min(tokens) < 0 or max(tokens) >= config.vocab_size:
        index, bad = next((i, t) for i, t in enumerate(tokens) if not 0 <= t < config.vocab_size)
        raise InvalidArgument(
            f"{op}: prompt_tokens[{index}] must be in [0, {config.vocab_size}), got {bad}"
        )
    return tokens
