"""Block names: a chained hash of tokens, so that a name identifies its whole prefix."""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from . import _host, config
from ._extra_keys import hash_extra_keys
from .errors import InvalidArgument, shown

ALGORITHMS = ("xxh3",)
UINT32 = np.dtype("<u4")

ExtraKey = int | str | bytes | None | Sequence["ExtraKey"]
ExtraKeys = ExtraKey  # of a sequence or a block: a single one, several, or None


def block_hashes(
    tokens: Any,
    block_size: int,
    *,
    cu_seqlens: Any = None,
    parents: Sequence[int | None] | np.ndarray | None = None,
    extra_keys: Sequence[ExtraKeys] | None = None,
    block_extra_keys: Sequence[Sequence[ExtraKeys] | None] | None = None,
    seed: int = 0,
    algorithm: str = "xxh3",
) -> NDArray[np.uint64]:
    """Name every full block of one or many token sequences.

    Equivalent to, for each sequence::

        for i in range(len(tokens) // block_size):
            block = tokens[i * block_size : (i + 1) * block_size]
            local = xxh3_64(little_endian_uint32(block), seed_of("mk.block"))
            has = (parent is not None) + 2 * (extra(i) is not None)
            link = uint64(parent or 0) + uint64(local) + uint64(extra(i) or 0) + uint64(has)
            parent = xxh3_64(link, seed_of("mk.chain"))  # begins as the sequence's parent, or None
            keys.append(parent)

    where ``+`` joins bytes, little-endian, ``seed_of(purpose)`` is ``xxh3_64(purpose +
    uint64(seed), 0)``, and ``extra(i)`` is None, or ``xxh3_64`` with ``seed_of("mk.extra")`` of the
    extra keys of block i (``reference/hashing.py`` gives their bytes). A root, a block with a
    parent and a block with extra keys never hash the same bytes, nor do two seeds.

    A key stands for everything that the block's KV depends on only if all of it is hashed: pass as
    extra keys the LoRA adapter and its version, the hashes of images and other embeddings that
    stand behind placeholder tokens, and a cache salt where tenants must not see each other's
    prefixes by their time to the first token. Otherwise different KV has one key. The model, the
    layout and the rank belong into the scope of ``object_keys``, or a store's namespace.

    The hash is fast, not cryptographic: whoever chooses tokens and knows the seed can construct
    two prompts with one key. Tenants that do not trust each other need separate scopes, or a
    secret, random seed each.

    Args:
        tokens: ``[num_tokens]`` token ids, all sequences one after another: a torch tensor on the
            CPU, a numpy array or a sequence of ints; any integer dtype, values in [0, 2**32). The
            dtype does not change the keys.
        block_size: tokens in a block. A partial block at a sequence's end gets no key.
        cu_seqlens: ``[num_sequences + 1]``, where each sequence starts in ``tokens``, and where the
            last one ends: increasing, from 0 to ``num_tokens``. None for one sequence.
        parents: for each sequence the key of the block before its first one, to continue a known
            prefix; None (for all, or for one) for a sequence without a prefix.
        extra_keys: for each sequence what all of its blocks depend on, also when it continues a
            prefix: a str, bytes, an int in [-2**63, 2**64), or a list or tuple of these, of None
            and of further ones. ``(None, "x")`` is not ``("x", None)``, nor ``"1"`` 1; ``"x"`` is
            ``("x",)``. None, or an empty one: nothing.
        block_extra_keys: for each sequence None, or an entry as above for each full block: what
            that block depends on, and by the chain the later ones.
        seed: of the hash, in [0, 2**64).
        algorithm: "xxh3".

    Returns:
        ``[num_blocks]`` uint64, the keys of all sequences one after another: sequence s has
        ``(cu_seqlens[s + 1] - cu_seqlens[s]) // block_size`` of them.

    Raises:
        InvalidArgument: an argument is not as above; the message names it.
    """
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise InvalidArgument(f"block_hashes: algorithm must be xxh3, got {shown(algorithm)}")
    _check_int("block_size", block_size, 1, 2**32)
    _check_int("seed", seed, 0, 2**64)
    token_array = _as_tokens(tokens)
    starts = None if cu_seqlens is None else _as_starts(cu_seqlens, token_array.size)
    num_sequences = 1 if starts is None else starts.size - 1
    parent_keys = has_parent = extras = has_extra = None
    if parents is not None:
        parent_keys, has_parent = _as_parents(parents, num_sequences)
    if extra_keys is not None or block_extra_keys is not None:
        lengths = np.array([token_array.size]) if starts is None else np.diff(starts)
        num_blocks = (lengths // int(block_size)).tolist()
        extras, has_extra = hash_extra_keys(extra_keys, block_extra_keys, num_blocks, int(seed))
    threads = config.current().threads or len(os.sched_getaffinity(0))
    return _host.block_hashes(
        token_array,
        int(block_size),
        int(seed),
        threads,
        starts,
        parent_keys,
        has_parent,
        extras,
        has_extra,
    )


def _check_int(name: str, value: int, low: int, high: int) -> None:
    is_int = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_int or not low <= value < high:
        raise InvalidArgument(
            f"block_hashes: {name} must be an integer in [{low}, {high}), got {shown(value)}"
        )


def _as_array(name: str, values: Any) -> np.ndarray:
    """Return a 1-d integer array, without a copy where possible."""
    if isinstance(values, torch.Tensor):
        if values.device.type != "cpu":
            raise InvalidArgument(f"block_hashes: {name} must be on the CPU, got {values.device}")
        is_int = values.layout == torch.strided and not values.dtype.is_floating_point
        if not is_int or values.dtype.is_complex:
            raise InvalidArgument(
                f"block_hashes: {name} must be 1-d integers, got {values.dtype}, {values.layout}"
            )
        values = values.detach()
    try:  # a tensor may be quantized, or negated lazily
        result = values.numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    except (OverflowError, ValueError, RuntimeError, TypeError) as error:
        raise InvalidArgument(
            f"block_hashes: {name} must be 1-d integers, got {type(values).__name__}: {error}"
        ) from None
    if result.size == 0 and result.dtype == np.float64:  # numpy's dtype for an empty list
        result = result.astype(np.int64)
    if result.ndim != 1 or result.dtype.kind not in "iu":
        raise InvalidArgument(
            f"block_hashes: {name} must be 1-d integers, got {result.dtype} of shape {result.shape}"
        )
    return result


def _as_tokens(tokens: Any) -> np.ndarray:
    is_uint32 = isinstance(tokens, np.ndarray) and tokens.dtype is UINT32
    if is_uint32 and tokens.ndim == 1 and tokens.flags.c_contiguous:
        return tokens  # the fast path
    if isinstance(tokens, (list, tuple)):
        converted = _host.token_array(tokens)
        if converted is not None:
            return converted
        if any(issubclass(kind, (int, np.bool_)) for kind in set(map(type, tokens))):
            _check_tokens(tokens)
    values = _as_array("tokens", tokens)
    if values.dtype != np.uint32 and values.size:
        for index in (int(values.argmin()), int(values.argmax())):
            if not 0 <= int(values[index]) < 2**32:
                raise InvalidArgument(
                    f"block_hashes: tokens[{index}] must be in [0, 2**32), got {values[index]}"
                )
    if values.dtype == np.int32:  # same bytes, now that none is negative
        values = values.view(np.uint32)
    return np.ascontiguousarray(values, dtype=UINT32)


def _check_tokens(tokens: Sequence[Any]) -> None:
    """Name the first token that numpy would convert, or that would make it choose another dtype."""
    for index, token in enumerate(tokens):
        if isinstance(token, (bool, np.bool_)):
            raise InvalidArgument(
                f"block_hashes: tokens must be 1-d integers, got bool at index {index}"
            )
        if isinstance(token, int) and not 0 <= token < 2**32:
            raise InvalidArgument(
                f"block_hashes: tokens[{index}] must be in [0, 2**32), got {shown(token)}"
            )


def _as_starts(cu_seqlens: Any, num_tokens: int) -> np.ndarray:
    starts = np.ascontiguousarray(_as_array("cu_seqlens", cu_seqlens), dtype=np.int64)
    if starts.size == 0 or starts[0] != 0 or starts[-1] != num_tokens:
        raise InvalidArgument(
            f"block_hashes: cu_seqlens must go from 0 to the number of tokens ({num_tokens}), "
            f"got {starts.tolist()[:1]} to {starts.tolist()[-1:]}"
        )
    falls = (starts[1:] < starts[:-1]).nonzero()[0]  # a difference may not fit int64
    if falls.size:
        index = int(falls[0]) + 1
        raise InvalidArgument(
            f"block_hashes: cu_seqlens must not decrease, got {starts[index]} after "
            f"{starts[index - 1]} at index {index}"
        )
    return starts


def _as_parents(
    parents: Sequence[int | None] | np.ndarray, num_sequences: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return (keys as uint64, whether each is present as uint8)."""
    if not isinstance(parents, (Sequence, np.ndarray)):
        raise InvalidArgument(
            "block_hashes: parents must be a sequence of integers or None, got "
            f"{type(parents).__name__}"
        )
    if isinstance(parents, np.ndarray) and parents.ndim != 1:
        raise InvalidArgument(
            f"block_hashes: parents must be of one dimension, got shape {parents.shape}"
        )
    if len(parents) != num_sequences:
        raise InvalidArgument(
            f"block_hashes: parents must have one entry for each of {num_sequences} sequences, "
            f"got {len(parents)}"
        )
    keys = np.zeros(num_sequences, np.uint64)
    present = np.zeros(num_sequences, np.uint8)
    for i, parent in enumerate(parents):
        if parent is not None:
            _check_int(f"parents[{i}]", parent, 0, 2**64)
            keys[i], present[i] = parent, 1
    return keys, present
