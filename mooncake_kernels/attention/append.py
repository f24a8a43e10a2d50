"""Write new keys and values to their slots in a paged KV cache."""

from functools import lru_cache
from typing import Literal

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .. import _library
from .._arguments import as_instance, as_one_of
from .._tensors import (
    check_stored,
    count_write,
    have_addresses,
    is_captured,
    refuse_gradients,
    rows_meet,
    shared_step,
    versioned,
)
from ..errors import InvalidArgument
from ..reference import attention as reference
from ..transforms import FLOATS, Rope
from .caches import AXES, ORDER, Caches

AppendEngine = Literal["auto", "host", "triton", "reference"]
ENGINES = ("auto", "host", "triton", "reference")
OP = "append_kv"
_kept_frequencies: dict[tuple[bytes, torch.device], torch.Tensor] = {}


def append_kv(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor | None,
    slots: torch.Tensor,
    *,
    axes: str = AXES,
    rope: Rope | None = None,
    positions: torch.Tensor | None = None,
    k_scale: float | torch.Tensor | None = None,
    v_scale: float | torch.Tensor | None = None,
    engine: AppendEngine = "auto",
) -> None:
    """Write the keys and values of new tokens to their slots of a paged cache.

    Equivalent to::

        for i, slot in enumerate(slots):
            if slot != -1:
                block, token = slot // block_size, slot % block_size
                key = k[i] if rope is None else rope turns k[i] by positions[i]
                k_cache[block, token] = (key / k_scale).to(k_cache.dtype)     # fp8 saturates
                v_cache[block, token] = (v[i] / v_scale).to(v_cache.dtype)

    computed in float32, with IEEE division and rounding to nearest even, like ``Fp8`` and ``Rope``
    of a ``CopyPlan``. Angles are computed in float64.

    Args:
        k: ``[n, kv_head, dim]``, float32, float16 or bfloat16, dim packed; ``[n, dim]`` where the
            axes have no head (MLA).
        v: the same except for dim; None, with ``v_cache``, if the cache has no separate values.
        k_cache: as for ``paged_attention``; it is written to. It must have memory for each of its
            elements, each axis stepping over all of those inside it. None of that may be memory of
            ``v_cache``, which is checked where both have the same strides or begin at one place,
            nor lie around ``k`` or ``v``.
        v_cache: the same.
        slots: int64 ``[n]``, each ``block * block_size + token``, or -1 for a token that is not
            written. The contents of a slot that is named twice are undefined; this is not checked.
        axes: the order of the caches' axes.
        rope: rotates the keys; None to leave them as they are. The first call on a GPU with these
            frequencies waits for the copy of them there, and no graph may be capturing it.
        positions: integers ``[n]``, the position of each token; used only by ``rope``.
        k_scale: the value of 1.0 in ``k_cache``: a number, or float ``[kv_head]``; None for 1.
            Positive and finite, which is not checked of a tensor on a GPU.
        v_scale: the same for ``v_cache``.
        engine: "host", "triton", "reference"; "auto" by the device.

    Raises:
        InvalidArgument: an argument is not as above, requires grad outside ``torch.no_grad()``, or
            has a forward tangent; then nothing is written. On CUDA a slot that is not in the cache
            is skipped, and a later call on that device raises.
        Unavailable: the named engine is not available.
    """
    as_one_of(OP, "engine", engine, ENGINES)
    if (v is None) != (v_cache is None):
        raise InvalidArgument(f"{OP}: v and v_cache must both be given, or none of them")
    caches = Caches.of(
        OP, k_cache, k_cache if v_cache is None else v_cache, axes, (k_scale, v_scale)
    )
    _check_writable("k_cache", caches.k)
    if v_cache is not None:
        _check_writable("v_cache", caches.v)
    k = _rows("k", k, caches.k)
    v = None if v is None else _rows("v", v, caches.v)
    if v is not None and len(v) != len(k):
        raise InvalidArgument(f"{OP}: v must be as long as k, {len(k)}, got {len(v)}")
    scales = {"k_scale": caches.k_scale, "v_scale": caches.v_scale}
    refuse_gradients(OP, k=k, v=v, k_cache=k_cache, v_cache=v_cache, **scales)
    _check_apart(k, v, caches.k, None if v_cache is None else caches.v)
    _check_slots(slots, k)
    cos_sin = None if rope is None else _cos_sin(rope, positions, k)
    arguments = (
        *(k, v, caches.k, None if v is None else caches.v, slots.contiguous(), cos_sin),
        *(0 if rope is None else rope.first, rope is not None and rope.interleaved),
        *(caches.k_scale, None if v is None else caches.v_scale),
    )
    if engine == "auto":
        engine = "host" if k.device.type == "cpu" else "triton"
        _library.log_choice(f"{OP} on {k.device.type}", engine)
    if engine == "reference":
        reference.append_kv(*arguments)
    elif engine == "triton":
        _library.triton_module(OP, "attention_append", k.device).append_kv(*arguments)
    else:
        _library.require_engine("host", k.device.type, OP)
        _library.call(_library.append_kv, *arguments)
    count_write(versioned([cache for cache in (k_cache, v_cache) if cache is not None]))


def _rows(name: str, rows: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    as_instance(OP, name, rows, torch.Tensor, "a tensor")
    check_stored(f"{OP}: {name}", rows)
    if rows.dim() == 2 and cache.shape[2] == 1:
        rows = rows.unsqueeze(1)
    if rows.dim() != 3 or rows.shape[1:] != cache.shape[2:] or rows.dtype not in FLOATS:
        raise InvalidArgument(
            f"{OP}: {name} must be float32, float16 or bfloat16 [n, {cache.shape[2]}, "
            f"{cache.shape[3]}], as its cache says, got {rows.dtype} of shape {tuple(rows.shape)}"
        )
    if rows.shape[2] > 1 and rows.stride(2) != 1:
        raise InvalidArgument(
            f"{OP}: {name} must have its dims packed (stride 1), got stride {rows.stride(2)}"
        )
    if rows.device != cache.device:
        raise InvalidArgument(
            f"{OP}: {name} must be on the device of its cache, {cache.device}, got {rows.device}"
        )
    return rows


def _check_writable(name: str, cache: torch.Tensor) -> None:
    check = _check_steps.__wrapped__ if torch.compiler.is_compiling() else _check_steps
    check(name, tuple(cache.shape), cache.stride())


@lru_cache(maxsize=256)  # the caches are the same at every step
def _check_steps(name: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Refuse a cache whose elements share memory."""
    shared = shared_step(strides[:3], shape[:3], ORDER[:3], shape[3])
    if shared is not None:
        raise InvalidArgument(
            f"{OP}: {name} must have memory for each of its elements, got {shared}"
        )


def _check_apart(
    k: torch.Tensor, v: torch.Tensor | None, k_cache: torch.Tensor, v_cache: torch.Tensor | None
) -> None:
    """Refuse what is one memory; keys and values of a cache may alternate in one range."""
    tensors = (k, v, k_cache, v_cache)
    if torch.compiler.is_compiling() or not have_addresses(tensors):
        return
    if v_cache is not None and k_cache.numel() and k_cache.data_ptr() == v_cache.data_ptr():
        raise InvalidArgument(f"{OP}: v_cache must have memory of its own, got that of k_cache")
    if v_cache is not None and k_cache.numel() and _meet(k_cache, v_cache):
        raise InvalidArgument(f"{OP}: v_cache must have memory of its own, got some of k_cache")
    storages = [None if t is None else t.untyped_storage().data_ptr() for t in tensors]
    if storages[0] not in storages[2:] and (v is None or storages[1] not in storages[2:]):
        return
    for cache_name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        for name, rows in (("k", k), ("v", v)):
            if cache is None or rows is None or not rows.numel() or not cache.numel():
                continue
            (begin, end), (first, last) = _range(rows), _range(cache)
            if begin < last and first < end:
                raise InvalidArgument(
                    f"{OP}: {name} must have memory of its own, got some inside {cache_name}"
                )


def _meet(k_cache: torch.Tensor, v_cache: torch.Tensor) -> bool:
    """Tell whether caches of the same strides share an element; False if their strides differ."""
    places = [(c.stride(), c.element_size(), c.shape[3]) for c in (k_cache, v_cache)]
    distance = v_cache.data_ptr() - k_cache.data_ptr()
    return _meet_at(tuple(k_cache.shape), *places, distance)


@lru_cache(maxsize=256)
def _meet_at(
    shape: tuple[int, ...],
    k_place: tuple[tuple[int, ...], int, int],
    v_place: tuple[tuple[int, ...], int, int],
    distance: int,
) -> bool:
    axes = [axis for axis in range(3) if shape[axis] > 1]
    steps = [[strides[axis] * size for axis in axes] for strides, size, _ in (k_place, v_place)]
    if steps[0] != steps[1]:
        return False
    k_bytes, v_bytes = (dim * size for _, size, dim in (k_place, v_place))
    return rows_meet([shape[axis] for axis in axes], steps[0], (k_bytes, v_bytes), distance)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where the first element begins and where the last one ends."""
    sizes_and_strides = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in sizes_and_strides)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _check_slots(slots: torch.Tensor, k: torch.Tensor) -> None:
    as_instance(OP, "slots", slots, torch.Tensor, "a tensor")
    if slots.dtype != torch.int64 or slots.shape != k.shape[:1] or slots.device != k.device:
        raise InvalidArgument(
            f"{OP}: slots must be int64 [{k.shape[0]}] on {k.device}, got {slots.dtype} of shape "
            f"{tuple(slots.shape)} on {slots.device}"
        )


def _cos_sin(rope: Rope, positions: torch.Tensor | None, k: torch.Tensor) -> torch.Tensor:
    """Return cosines and sines, float32 ``[n, 2, pairs]``."""
    as_instance(OP, "rope", rope, Rope, "a Rope")
    as_instance(OP, "positions", positions, torch.Tensor, "a tensor where there is a rope")
    assert positions is not None
    is_integer = positions.dtype in (torch.int32, torch.int64)
    if not is_integer or positions.shape != k.shape[:1] or positions.device != k.device:
        raise InvalidArgument(
            f"{OP}: positions must be int32 or int64 [{k.shape[0]}] on {k.device}, got "
            f"{positions.dtype} of shape {tuple(positions.shape)} on {positions.device}"
        )
    angles = positions.to(torch.float64)[:, None] * _frequencies(rope, k.shape[2], positions)
    return torch.stack((angles.cos(), angles.sin()), dim=1).to(torch.float32)


def _frequencies(rope: Rope, dim: int, positions: torch.Tensor) -> torch.Tensor:
    """Return a rope's frequencies on the device of the positions.

    On a GPU they are cached for good, by their values: a copy to it would wait, few models are
    served at once, and graphs read them.
    """
    device = positions.device
    is_kept = device.type != "cpu" and not torch.compiler.is_compiling()
    if not is_kept or not have_addresses((positions,)):
        return rope.frequencies(dim).to(device)
    with unset_fake_temporarily():
        frequencies = rope.frequencies(dim)
        key = (frequencies.numpy().tobytes(), device)
        kept = _kept_frequencies.get(key)
        if kept is None:
            if device.type == "cuda" and is_captured():
                raise InvalidArgument(
                    f"{OP}: rope must have been used on {device} before a CUDA graph is captured"
                )
            kept = _kept_frequencies[key] = frequencies.to(device)
        return kept
