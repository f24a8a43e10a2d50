"""A prompt's prefix in the store, for models of transformers: no engine is needed.

::

    with PrefixStore("shm:/dev/shm/kv?size=8GiB", model) as prefixes:
        cache = prefixes.cache_for(ids)  # with as much of ids as any process has computed
        out = model.generate(ids, past_key_values=cache, max_new_tokens=100)
        prefixes.save(cache, out)

docs/serving/transformers.md says what is shared with whom, and what is refused.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel
from transformers import __version__ as transformers_version
from transformers.cache_utils import DynamicLayer

import mooncake_kernels as mk
from mooncake_kernels.closeable import Closeable
from mooncake_kernels.errors import InvalidArgument, Unavailable

from .tier_store import TierStore, namespace_of

BLOCK_TOKENS = 64
STAGING_BYTES = 64 << 20
CHANGING_ROPE = ("dynamic", "longrope")  # the keys of a prefix depend on what follows


class StoreCache(DynamicCache):
    """A cache of transformers that begins with a prefix from the store.

    Attributes:
        num_loaded: tokens that came from the store.
        prompt: ``[num_tokens]``: the tokens it is for.
    """

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor):
        super().__init__(config=model.config)
        self.num_loaded = 0
        self.prompt = prompt


class PrefixStore(Closeable):
    """Prefixes of one model, shared by all processes whose URL leads to the same store.

    Tokens are kept in whole blocks. A block is one object: k, then v, of each layer,
    ``[head, token, dim]``; its key is a chained hash of all tokens up to its end, among blocks of
    the same model, dtype, attention implementation and version of transformers. A store that cannot
    be reached, a damaged block or one that was evicted means that its tokens are computed.

    Thread-safe. A context manager.

    Args:
        url: see ``open_store``.
        model: decoder only, with a cache of keys and values of all tokens in each layer. It runs
            once, on one token, which tells the form of its caches.
        namespace: what distinguishes models beyond that: required for adapters; use another when
            weights are replaced under the same name.
        block_tokens: of a block, at least 1. Part of the namespace.

    Attributes:
        block_tokens: as passed.
        block_bytes: of a block, all layers.
        store: what holds the blocks; ``store.failures`` counts what went wrong.

    Raises:
        InvalidArgument: an argument is wrong, or the store is smaller than a block.
        Unavailable: the model's caches, or its positions, do not allow it.
        OSError: as ``open_store``.
    """

    def __init__(
        self,
        url: str,
        model: PreTrainedModel,
        *,
        namespace: str = "",
        block_tokens: int = BLOCK_TOKENS,
    ):
        if not isinstance(model, PreTrainedModel):
            raise InvalidArgument(
                f"PrefixStore: model must be a PreTrainedModel, got {type(model).__name__}"
            )
        if type(block_tokens) is not int or block_tokens < 1:
            raise InvalidArgument(
                f"PrefixStore: block_tokens must be an integer of at least 1, got {block_tokens!r}"
            )
        if getattr(model, "peft_config", None) and not namespace:
            raise InvalidArgument(
                "PrefixStore: namespace must name the adapters of a model that has some, got ''"
            )
        _check_positions(model)
        self._model = model
        self.block_tokens = block_tokens
        self._layers = _layers_of(model)
        self.block_bytes = sum(
            block_tokens * _token_bytes(keys) + block_tokens * _token_bytes(values)
            for keys, values in self._layers
        )
        forms = [
            [tuple(t.shape[1::2]), str(t.dtype)] for layer in self._layers for t in layer
        ]  # heads and dim
        parts = {
            "name": model.config.name_or_path,
            "revision": getattr(model.config, "_commit_hash", None),
            "config": _digest(model.config.to_json_string(use_diff=False)),
            "attention": model.config._attn_implementation,
            "transformers": transformers_version,
            "block_tokens": block_tokens,
            "caches": forms,
            "namespace": namespace,
        }
        self.store = TierStore(url, namespace_of("transformers", parts))
        try:
            self.store.check_page("PrefixStore", self.block_bytes)
        except InvalidArgument:
            self.store.close()
            raise

    def cache_for(self, ids: torch.Tensor | Sequence[int]) -> StoreCache:
        """Return a cache with the longest prefix of a prompt that the store has.

        At least the last token is left to be computed: what follows it is asked for.

        Args:
            ids: ``[num_tokens]`` or ``[1, num_tokens]``, without padding.

        Returns:
            to be passed to the model as ``past_key_values``, with the same ids.
        """
        prompt = _tokens("PrefixStore.cache_for", ids)
        cache = StoreCache(self._model, prompt)
        names = self._names(prompt[:-1])
        names = names[: self.store.match_prefix(names)]
        step = max(STAGING_BYTES // self.block_bytes, 1)
        parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # of each chunk, by layer
        for first in range(0, len(names), step):
            chunk = names[first : first + step]
            staging = self._staging(len(chunk))
            came = self.store.get_each(chunk, *_places(staging))
            num = len(chunk) if came.all() else int(came.argmin())
            if num:
                parts.append([self._on_device(staging[:num], i) for i in range(len(self._layers))])
                cache.num_loaded += num * self.block_tokens
            if num < len(chunk):  # evicted meanwhile
                break
        for i, layer in enumerate(zip(*parts, strict=True)):
            keys, values = (torch.cat(side, dim=-2) for side in zip(*layer, strict=True))
            cache.update(keys, values, i)
        return cache

    def save(self, cache: StoreCache, ids: torch.Tensor | Sequence[int]) -> int:
        """Keep what a cache has, in whole blocks, for all processes.

        Args:
            cache: of ``cache_for``, after the model has run.
            ids: ``[num_tokens]`` or ``[1, num_tokens]``: all tokens so far, as ``generate`` returns
                them. The last one is usually not in the cache yet, and is not kept.

        Returns:
            how many tokens the store has of them now.

        Raises:
            InvalidArgument: the ids do not begin with the cache's prompt, there are fewer than the
                cache has, or the cache is not one sequence.
        """
        op = "PrefixStore.save"
        if not isinstance(cache, StoreCache):
            raise InvalidArgument(
                f"{op}: cache must be a StoreCache, of cache_for, got {type(cache).__name__}"
            )
        tokens, num_cached = _tokens(op, ids), cache.get_seq_length()
        if len(tokens) < num_cached or not torch.equal(
            tokens[: len(cache.prompt)], cache.prompt[: len(tokens)]
        ):
            raise InvalidArgument(
                f"{op}: ids must begin with the {len(cache.prompt)} tokens that the cache is for, "
                f"and have at least the {num_cached} that are in it, got {len(tokens)}"
            )
        if num_cached == 0:
            return 0
        layers: list[Any] = cache.layers  # DynamicLayer each, see _layers_of
        if (num_rows := layers[0].keys.shape[0]) != 1:
            raise InvalidArgument(f"{op}: cache must be of one sequence, got {num_rows}")
        names = self._names(tokens[:num_cached])
        there = self.store.match_prefix(names)
        step = max(STAGING_BYTES // self.block_bytes, 1)
        for first in range(there, len(names), step):
            chunk = names[first : first + step]
            staging = self._staging(len(chunk))
            for i in range(len(self._layers)):
                self._from_device(layers[i], first, staging, i)
            if staging.is_pinned():
                torch.cuda.synchronize()
            if not self.store.put_each(chunk, *_places(staging)).all():
                break  # there is no room for more
        return self.store.match_prefix(names) * self.block_tokens

    @property
    def closed(self) -> bool:
        return self.store.closed

    def close(self) -> None:
        """Close the store; what is in it stays for others."""
        self.store.close()

    def _names(self, tokens: torch.Tensor) -> list[bytes]:
        keys = mk.block_hashes(tokens, self.block_tokens)
        return [key.tobytes() for key in keys]

    def _staging(self, num_blocks: int) -> torch.Tensor:
        """``[num_blocks, block_bytes]`` of host memory."""
        is_cuda = self._layers[0][0].device.type == "cuda"
        shape = (num_blocks, self.block_bytes)
        return torch.empty(shape, dtype=torch.uint8, pin_memory=is_cuda)

    def _parts(self, staging: torch.Tensor, layer: int) -> list[torch.Tensor]:
        """k and v of a layer in staging memory: ``[num_blocks, head, token, dim]`` each."""
        size = self.block_tokens
        first = sum(size * _token_bytes(t) for pair in self._layers[:layer] for t in pair)
        parts = []
        for like in self._layers[layer]:
            num_bytes = size * _token_bytes(like)
            part = staging[:, first : first + num_bytes].view(like.dtype)
            parts.append(part.unflatten(1, (like.shape[1], size, like.shape[3])))
            first += num_bytes
        return parts

    def _on_device(self, staging: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v of a layer: ``[1, head, token, dim]``."""
        device = self._layers[layer][0].device
        keys, values = (
            part.to(device).transpose(0, 1).flatten(1, 2).unsqueeze(0)
            for part in self._parts(staging, layer)
        )
        return keys, values

    def _from_device(self, cached: Any, first: int, staging: torch.Tensor, layer: int) -> None:
        size, num = self.block_tokens, len(staging)
        for part, tensor in zip(
            self._parts(staging, layer), (cached.keys, cached.values), strict=True
        ):
            tokens = tensor[0, :, first * size : (first + num) * size]
            part.copy_(tokens.unflatten(1, (num, size)).transpose(0, 1), non_blocking=True)


def _check_positions(model: PreTrainedModel) -> None:
    """Refuse models in which the cache of a prefix depends on what follows it."""
    if model.config.is_encoder_decoder:
        raise Unavailable("PrefixStore: model must be decoder only, got an encoder and a decoder")
    text = model.config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        if (kind := parameters.get("rope_type")) in CHANGING_ROPE:
            raise Unavailable(
                "PrefixStore: model must have positions that do not depend on the prompt's length, "
                f"got rope_type {kind!r}"
            )


def _layers_of(model: PreTrainedModel) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """k and v of each layer, ``[1, head, 1, dim]``: the model's caches after one token."""
    cache = DynamicCache(config=model.config)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.no_grad():
        model(token, past_key_values=cache, use_cache=True)
    for i, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:  # subclasses have a window, states, an indexer
            raise Unavailable(
                "PrefixStore: model must keep the keys and values of all tokens in each layer "
                f"(DynamicLayer), got {type(layer).__name__} in layer {i}"
            )
    layers: list[Any] = cache.layers
    if not layers or not all(layer.is_initialized for layer in layers):
        raise Unavailable("PrefixStore: model must fill the cache of each layer, got an empty one")
    return [(layer.keys, layer.values) for layer in layers]


def _tokens(op: str, ids: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """``[num_tokens]`` int64 on the CPU."""
    tokens = torch.as_tensor(ids).cpu()
    if tokens.dim() == 2 and tokens.shape[0] == 1:
        tokens = tokens[0]
    if tokens.dim() != 1 or not len(tokens) or tokens.is_floating_point():
        raise InvalidArgument(
            f"{op}: ids must be integers [num_tokens] or [1, num_tokens] of one prompt, got "
            f"{tokens.dtype} {tuple(tokens.shape)}"
        )
    return tokens.long()


def _places(staging: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return addresses and sizes of the rows."""
    rows = np.arange(len(staging), dtype=np.uint64) * np.uint64(staging.stride(0))
    sizes = np.full(len(staging), staging.shape[1], np.uint64)
    return rows + np.uint64(staging.data_ptr()), sizes


def _token_bytes(like: torch.Tensor) -> int:
    return like.shape[1] * like.shape[3] * like.dtype.itemsize


def _digest(text: str) -> str:
    """Name a configuration in a few bytes, without what differs between its copies."""
    config = {
        name: value
        for name, value in json.loads(text).items()
        if not name.startswith("_") and name not in ("transformers_version", "use_cache")
    }
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:32]
