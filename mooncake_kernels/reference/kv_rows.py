"""The specification of a copy's row transforms: fp8, RoPE and checksums."""

from collections.abc import Sequence

import numpy as np
import torch

from ..transforms import FP8, Rope

WORD_BYTES = 8


def transformed(
    row: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor, rope: Rope | None, delta: int
) -> torch.Tensor:
    """Return a row transformed by ``mk.Fp8`` and ``mk.Rope``, or unchanged if neither applies."""
    if rope is None and row.dtype == dtype:
        return row
    wide = row.float()
    if row.dtype in FP8 and dtype not in FP8:
        wide = wide * scale
    if rope is not None:
        wide = rotate(wide, rope, delta)
    if dtype not in FP8:
        return wide.to(dtype)
    if row.dtype not in FP8:
        wide = wide / scale
    largest = torch.finfo(dtype).max
    return wide.clamp(-largest, largest).to(dtype)


def rotate(row: torch.Tensor, rope: Rope, delta: int) -> torch.Tensor:
    """Return a row of floats with its pairs rotated by ``delta`` positions, in float64."""
    angle = delta * rope.frequencies(row.shape[-1]).to(row.device)
    num_pairs = angle.numel()
    out = row.double().clone()
    turned = out[..., rope.first : rope.first + 2 * num_pairs]
    if rope.interleaved:
        x, y = turned[..., 0::2], turned[..., 1::2]
    else:
        x, y = turned[..., :num_pairs], turned[..., num_pairs:]
    old_x, old_y = x.clone(), y.clone()
    x.copy_(old_x * angle.cos() - old_y * angle.sin())
    y.copy_(old_y * angle.cos() + old_x * angle.sin())
    return out


def checksum(rows: Sequence[tuple[int, torch.Tensor]]) -> int:
    """Return the checksum of rows, each with the index of its first word.

    Equivalent to: the sum, modulo 2**64, over rows and their words, of::

        key = (index * 0x9e3779b97f4a7c15 + 0xd1b54a32d192ed03) | 1
        product = ((word ^ word >> 32) + 0x8cb92ba72f3d8dd7) * key
        term = product ^ product >> 32
    """
    total = 0
    for first_word, row in rows:
        data = row.contiguous().view(torch.uint8).cpu().numpy().tobytes()
        data += bytes(-len(data) % WORD_BYTES)
        word = np.frombuffer(data, dtype="<u8")
        index = np.uint64(first_word) + np.arange(word.size, dtype=np.uint64)
        half, one = np.uint64(32), np.uint64(1)
        key = (index * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0xD1B54A32D192ED03)) | one
        product = ((word ^ (word >> half)) + np.uint64(0x8CB92BA72F3D8DD7)) * key
        total += int((product ^ (product >> half)).sum(dtype=np.uint64))
    return int(np.array(total % 2**64, dtype=np.uint64).astype(np.int64))


def words_of(row_bytes: int) -> int:
    """Return the number of words of a row, the last one padded."""
    return -(-row_bytes // WORD_BYTES)
