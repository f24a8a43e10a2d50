"""The caches that attention reads and writes, checked, with their axes in one order."""

from dataclasses import dataclass
from typing import Any

import torch

from .._arguments import as_float32, as_instance, is_number
from .._tensors import check_device, check_stored, have_addresses
from ..errors import InvalidArgument, shown
from ..transforms import FLOATS, FP8

ORDER = ("block", "token", "head", "dim")
AXES = " ".join(ORDER)


@dataclass(frozen=True)
class Caches:
    """Keys and values as ``[block, token, head, dim]``, strided, and their scales.

    Attributes:
        k, v: views of the given tensors; ``v`` may be a part of ``k`` (MLA).
        k_scale, v_scale: the value of 1.0, float32 ``[head]``, or None for 1.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    @classmethod
    def of(
        cls,
        op: str,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        axes: str,
        scales: tuple[Any, Any],
    ) -> "Caches":
        """Check the caches of a call of ``op``, and their scales.

        Raises:
            InvalidArgument: they do not match the axes, each other or the scales.
        """
        k, v = (
            _in_order(op, name, cache, axes)
            for name, cache in (("k_cache", k_cache), ("v_cache", v_cache))
        )
        if k.shape[:3] != v.shape[:3] or k.device != v.device:
            raise InvalidArgument(
                f"{op}: v_cache must have the shape of k_cache ({tuple(k.shape[:3])}, but for "
                f"dim) and its device ({k.device}), got {tuple(v.shape[:3])} on {v.device}"
            )
        return cls(k, v, *(_scale(op, *pair, k) for pair in zip("kv", scales, strict=True)))


def _in_order(op: str, name: str, cache: torch.Tensor, axes: str) -> torch.Tensor:
    as_instance(op, name, cache, torch.Tensor, "a tensor")
    names = axes.split() if isinstance(axes, str) else []
    if sorted(names) not in (sorted(ORDER), sorted(set(ORDER) - {"head"})):
        raise InvalidArgument(
            f"{op}: axes must be an order of {AXES!r}, 'head' may be missing, got {shown(axes)}"
        )
    check_stored(f"{op}: {name}", cache)
    if cache.dim() != len(names):
        raise InvalidArgument(
            f"{op}: {name} must have {len(names)} axes, {axes!r}, got shape {tuple(cache.shape)}"
        )
    if cache.dtype not in (*FLOATS, *FP8):
        raise InvalidArgument(
            f"{op}: {name} must be float32, float16, bfloat16 or fp8, got {cache.dtype}"
        )
    check_device(op, name, cache)
    if "head" not in names:
        cache, names = cache.unsqueeze(-1), [*names, "head"]
    cache = cache.permute([names.index(axis) for axis in ORDER])
    if 0 in cache.shape[1:]:
        raise InvalidArgument(
            f"{op}: {name} must have tokens, heads and dims, got shape {tuple(cache.shape)}"
        )
    if cache.shape[3] > 1 and cache.stride(3) != 1:
        raise InvalidArgument(
            f"{op}: {name} must have its dims packed (stride 1), got stride {cache.stride(3)}"
        )
    return cache


def _scale(op: str, which: str, scale: Any, cache: torch.Tensor) -> torch.Tensor | None:
    if scale is None:
        return None
    num_heads = cache.shape[2]
    if is_number(scale):
        value = as_float32(op, f"{which}_scale", scale, positive=True)
        return torch.full((num_heads,), value, dtype=torch.float32, device=cache.device)
    is_table = isinstance(scale, torch.Tensor) and scale.dtype in (*FLOATS, torch.float64)
    if not is_table or scale.shape not in ((), (1,), (num_heads,)) or scale.device != cache.device:
        raise InvalidArgument(
            f"{op}: {which}_scale must be a number, or a floating-point tensor on {cache.device} "
            f"that is a scalar or has one entry a KV head ({num_heads}), got {shown(scale)}"
        )
    scales = scale.to(torch.float32)
    if _is_readable(scales) and not bool((scales.isfinite() & (scales > 0)).all()):
        raise InvalidArgument(
            f"{op}: {which}_scale must be positive and finite, got {shown(scale.tolist())}"
        )
    return scales.expand(num_heads).contiguous()


def _is_readable(tensor: torch.Tensor) -> bool:
    """Tell whether reading it does not wait for a GPU, and it has values."""
    return not torch.compiler.is_compiling() and have_addresses([tensor]) and tensor.is_cpu
