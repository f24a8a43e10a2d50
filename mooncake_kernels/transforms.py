"""Transforms of elements during a copy: ``mk.Fp8`` and ``mk.Rope``."""

import math
import numbers
from typing import Any

import torch

from .errors import InvalidArgument, shown

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
BYTES = 0
# The numbers in csrc/common/element.h.
ELEMENT_TYPES = {dtype: i for i, dtype in enumerate((*FLOATS, *FP8), start=1)}


class Fp8:
    """Convert between floats and scaled fp8: ``CopyPlan(..., convert=Fp8(scale))``.

    The dtypes of the two caches give the direction: one is float32, float16 or bfloat16, the
    other float8_e4m3fn or float8_e5m2 (view a cache kept as uint8 as that first).
    Equivalent to::

        largest = torch.finfo(fp8).max
        dst = (src.float() / scale).clamp(-largest, largest).to(fp8)    # to fp8: it saturates
        dst = (src.float() * scale).to(dst.dtype)                       # from fp8

    with IEEE division and rounding to nearest even, as vLLM quantizes its caches. Views with the
    same dtype on both sides (such as the scales stored with the keys and values) are copied
    unchanged.

    Args:
        scale: the value of 1.0 in fp8. A number; or a tensor that broadcasts to ``[layer, kv,
            head]`` of the fp8 cache: ``[layers, 2, 1]`` is one scale per tensor, ``[1, 1, heads]``
            one per head. It is copied when a plan is made with it.

    Raises:
        InvalidArgument: a scale is not positive and finite, or not a number or tensor as above.
    """

    def __init__(self, scale: float | torch.Tensor = 1.0):
        is_number = isinstance(scale, numbers.Real) and not isinstance(scale, bool)
        if not is_number and not isinstance(scale, torch.Tensor):
            raise InvalidArgument(
                f"Fp8: scale must be a number or a tensor, got {type(scale).__name__}"
            )
        tensor = scale if isinstance(scale, torch.Tensor) else _float64("Fp8: scale", scale)
        if tensor.dim() not in (0, 3) or tensor.dtype not in (*FLOATS, torch.float64):
            raise InvalidArgument(
                "Fp8: scale must be a number or a floating-point tensor [layer, kv, head], got "
                f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            )
        self.scale = tensor.detach().to("cpu", torch.float32, copy=True)
        if not bool((torch.isfinite(self.scale) & (self.scale > 0)).all()):
            raise InvalidArgument(f"Fp8: scale must be positive and finite, got {scale}")

    of_copy = False  # whether ``scale`` is that of a copy's selection, in its layer order

    def for_copy(self, table: torch.Tensor) -> "Fp8":
        """Return one for a copy with these scales, ``[layer, kv, head]`` of its selection."""
        convert = Fp8(table)
        convert.of_copy = True
        return convert

    def table(self, sizes: tuple[int, int, int]) -> torch.Tensor:
        """Return the scales of an fp8 cache, ``[layer, kv, head]``."""
        try:
            return self.scale.expand(sizes)
        except RuntimeError:
            raise InvalidArgument(
                f"Fp8: scale must broadcast to {list(sizes)}, [layer, kv, head] of the fp8 cache, "
                f"got shape {tuple(self.scale.shape)}"
            ) from None


class Rope:
    """Rotate keys to other positions during a copy: ``CopyPlan(..., rope=Rope(theta))``.

    A key rotated for position p becomes one for position q. Equivalent to::

        angle = (q - p) * inv_freq[j]
        x, y = row[first + j], row[first + j + rotary_dim // 2]     # interleaved: 2j and 2j + 1
        row[..] = x * cos(angle) - y * sin(angle), y * cos(angle) + x * sin(angle)

    for each of ``rotary_dim // 2`` pairs; values and the rest of the row are unchanged. In a cache
    without a ``kv`` axis (MLA) all rows are keys. Angles are computed in float64, rows are rotated
    in float32. A factor by which the embedding multiplied the keys (YaRN's) is preserved.
    (RoFormer, section 3.4.)

    Args:
        theta: ``inv_freq[j] = theta ** (-2 j / rotary_dim)``.
        interleaved: pairs are neighbours (GPT-J); else a row's two halves (GPT-NeoX, Llama).
        rotary_dim: how many elements of a row are rotated, an even number; None for all from
            ``first`` on.
        first: the first rotated element: 512 for DeepSeek's rows of 512 + 64.
        inv_freq: scaled frequencies, ``[rotary_dim // 2]``, instead of ``theta``: as the model
            has them (Llama 3's, YaRN's, linear scaling).

    Raises:
        InvalidArgument: an argument is not as above.
    """

    def __init__(
        self,
        theta: float = 10000.0,
        interleaved: bool = False,
        *,
        rotary_dim: int | None = None,
        first: int = 0,
        inv_freq: Any = None,
    ):
        if not isinstance(theta, numbers.Real) or not 0 < theta < math.inf:
            raise InvalidArgument(f"Rope: theta must be a positive number, got {shown(theta)}")
        base = _float64("Rope: theta", theta)
        if not isinstance(interleaved, bool):
            raise InvalidArgument(
                f"Rope: interleaved must be True or False, got {shown(interleaved)}"
            )
        for name, value, least in (("first", first, 0), ("rotary_dim", rotary_dim, 2)):
            is_count = isinstance(value, numbers.Integral) and not isinstance(value, bool)
            if value is not None and not (is_count and value >= least):
                raise InvalidArgument(
                    f"Rope: {name} must be an integer >= {least}, got {shown(value)}"
                )
        if rotary_dim is not None and rotary_dim % 2:
            raise InvalidArgument(f"Rope: rotary_dim must be even, got {rotary_dim}")
        self.theta: float = base.item()
        self.interleaved: bool = interleaved
        self.rotary_dim: int | None = rotary_dim
        self.first: int = int(first)
        self._inv_freq: torch.Tensor | None = None
        if inv_freq is not None:
            self._inv_freq = _frequencies(inv_freq, rotary_dim)

    def num_pairs(self, head_dim: int) -> int:
        """Return how many pairs of a row are rotated.

        Raises:
            InvalidArgument: the row is too short.
        """
        if self._inv_freq is not None:
            rotary_dim = 2 * self._inv_freq.numel()
        else:
            rotary_dim = head_dim - self.first if self.rotary_dim is None else self.rotary_dim
        if rotary_dim < 2 or rotary_dim % 2 or self.first + rotary_dim > head_dim:
            raise InvalidArgument(
                f"Rope: rotary_dim must be even and, with first {self.first}, inside rows of "
                f"{head_dim} elements, got {rotary_dim}"
            )
        return rotary_dim // 2

    def frequencies(self, head_dim: int) -> torch.Tensor:
        """Return the frequencies, float64 ``[num_pairs]``, for rows of ``head_dim`` elements."""
        num_pairs = self.num_pairs(head_dim)
        if self._inv_freq is not None:
            return self._inv_freq
        exponents = torch.arange(num_pairs, dtype=torch.float64, device="cpu") / num_pairs
        return torch.as_tensor(self.theta, dtype=torch.float64, device="cpu") ** -exponents


def _float64(name: str, values: Any) -> torch.Tensor:
    """Return numbers as a tensor, regardless of torch's default dtype and device."""
    try:
        values = float(values) if isinstance(values, numbers.Real) else values
        return torch.tensor(values, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InvalidArgument(
            f"{name} must be numbers that float64 holds, got {type(values).__name__}: {error}"
        ) from None


def _frequencies(inv_freq: Any, rotary_dim: int | None) -> torch.Tensor:
    if not isinstance(inv_freq, torch.Tensor):
        inv_freq = _float64("Rope: inv_freq", inv_freq)
    if inv_freq.is_complex() or inv_freq.dtype == torch.bool:
        raise InvalidArgument(f"Rope: inv_freq must be real numbers, got {inv_freq.dtype}")
    table = inv_freq.detach().to("cpu", torch.float64, copy=True)
    wanted = "" if rotary_dim is None else f" {rotary_dim // 2}"
    fits = rotary_dim is None or table.numel() == rotary_dim // 2
    if table.dim() != 1 or table.numel() == 0 or not fits or not bool(table.isfinite().all()):
        raise InvalidArgument(
            f"Rope: inv_freq must be a list of{wanted} finite numbers, got shape "
            f"{tuple(table.shape)}"
        )
    return table
