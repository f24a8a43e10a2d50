"""A plan's transforms in torch: layer by layer, into preallocated tensors."""

from dataclasses import dataclass

import torch

HND = "kv block head token dim"
THETA, SCALE = 10000.0, 0.5
FLOAT, FP8 = torch.bfloat16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Transform:
    """One of the things a plan can do; the flags are CopyPlan's."""

    name: str
    src: torch.dtype = FLOAT
    dst: torch.dtype = FLOAT
    rope: bool = False
    checksum: bool = False
    verify: bool = False

    @property
    def converts(self) -> bool:
        return self.src != self.dst


class ByTorch:
    """The blocks of one cache, transformed, into another one; without checksums.

    Args:
        transform: what is done.
        src: ``[2, block, token, head, dim]``, one tensor a layer.
        dst: likewise, or ``[2, block, head, token, dim]`` if ``dst_axes`` says so.
        dst_axes: of dst.
        ids: of both sides.
        deltas: by how many positions each block's keys are turned.
    """

    def __init__(self, transform: Transform, src, dst, dst_axes: str, ids, deltas):
        self.transform, self.src, self.dst, self.ids = transform, src, dst, ids
        self.transposed, self.deltas = dst_axes == HND, deltas
        self.picked = src[0].view(torch.int16 if src[0].dtype == FLOAT else torch.int64)[:, ids[0]]
        shape = (2, len(ids[0]), *src[0].shape[2:])
        self.numbers = torch.empty(shape, device=src[0].device)
        self.landed = torch.empty_like(dst[0][:, : len(ids[1])])

    def __call__(self) -> None:
        transform, landed = self.transform, self.landed
        rows = landed.transpose(2, 3) if self.transposed else landed
        for src, dst in zip(self.src, self.dst, strict=True):
            torch.index_select(src.view(self.picked.dtype), 1, self.ids[0], out=self.picked)
            numbers = self.picked.view(src.dtype)
            if transform.converts or transform.rope:
                numbers = self.numbers.copy_(numbers)
                if src.dtype == FP8:
                    numbers.mul_(SCALE)
                if transform.rope:
                    self._turn(numbers[0])
                if dst.dtype == FP8:
                    largest = torch.finfo(FP8).max
                    numbers.div_(SCALE).clamp_(-largest, largest)
            rows.copy_(numbers)
            # As words: torch's index_copy_ moves one element at a time on the CPU.
            dst.view(torch.int64).index_copy_(1, self.ids[1], landed.view(torch.int64))

    def _turn(self, keys: torch.Tensor) -> None:
        half = keys.shape[-1] // 2
        exponents = torch.arange(half, dtype=torch.float64, device=keys.device) / half
        angles = self.deltas[:, None].double() * THETA**-exponents
        cos, sin = (f(angles).float()[:, None, None] for f in (torch.cos, torch.sin))
        x, y = keys[..., :half], keys[..., half:]
        turned = x * cos - y * sin
        y.mul_(cos).addcmul_(x, sin)
        x.copy_(turned)
