"""Signatures of a prompt's tokens: what they say and what they follow, in a few bytes each."""

import sys
from typing import Literal, NamedTuple

import torch

import mooncake_kernels as mk

from ..arguments import as_count, refuse
from .arguments import as_bits, as_number

Order = Literal["context", "rotary"]


class Signatures(NamedTuple):
    """What is kept of a prompt's tokens to find similar ones: uint8 ``[num_tokens, num_bytes]``."""

    content: torch.Tensor  # of each token alone: which prompt is similar
    placed: torch.Tensor  # of each token where it stands: which of its tokens to reuse


def with_context(embeddings: torch.Tensor, num_tokens: int, decay: float) -> torch.Tensor:
    """Add to each token's embedding those of the tokens before it, each in a place of its own.

    Equivalent to::

        for t in range(len(embeddings)):
            for back in range(min(num_tokens, t) + 1):
                out[t] += decay ** back * embeddings[t - back].roll(back)

    Rolled vectors are nearly orthogonal to their originals, so the order of the tokens matters
    (the n-grams of hyperdimensional computing; Kanerva, 2009). Where a token is in the prompt does
    not: a sentence that moves keeps its signatures, but for the first tokens after its seams.

    Args:
        embeddings: ``[num_tokens_of_prompt, dim]``, floating point.
        num_tokens: how many earlier tokens count.
        decay: how much less each counts than the one after it.
    """
    out = embeddings.clone()
    for back in range(1, min(num_tokens, len(embeddings) - 1) + 1):
        out[back:] += decay**back * embeddings[:-back].roll(back, dims=1)
    return out


def with_positions(embeddings: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate embeddings to their positions, as keys are: SemShareKV's way to prefer near matches.

    Dimension i rotates with dimension ``i + dim / 2`` by ``position * theta ** (-2 i / dim)``.

    Args:
        embeddings: ``[num_tokens, dim]``, dim even.
        theta: the base of the frequencies.
    """
    half = embeddings.shape[1] // 2
    exponents = torch.arange(half, dtype=torch.float64, device=embeddings.device) / half
    positions = torch.arange(len(embeddings), dtype=torch.float64, device=embeddings.device)
    angles = positions[:, None] * theta**-exponents
    cos, sin = angles.cos().to(embeddings.dtype), angles.sin().to(embeddings.dtype)
    first, second = embeddings.split(half, dim=1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=1)


class Signer:
    """Make signatures of prompts that are comparable with each other.

    Args:
        dim: of the embeddings.
        bits: of a signature, a multiple of 8; 256 as in a reproduction of SemShareKV.
        order: how a token's place gets into its signature. "context": by the tokens before it
            (ours, ``with_context``); "rotary": by its absolute position (SemShareKV, arXiv
            2509.24832, ``with_positions``). docs/serving/semantic.md compares them.
        context_tokens: of "context".
        context_decay: of "context", in [0, 1].
        theta: of "rotary", at least 1.
        seed: of the random planes, below 2**64. Signatures of equal arguments are comparable.
        device: of the embeddings.

    Raises:
        InvalidArgument: an argument is not as above.
    """

    def __init__(
        self,
        dim: int,
        *,
        bits: int = 256,
        order: Order = "context",
        context_tokens: int = 8,
        context_decay: float = 0.6,
        theta: float = 10000.0,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.dim = as_count("Signer", "dim", dim, 1)
        self.bits = as_bits("Signer", bits)
        if order not in ("context", "rotary"):
            refuse("Signer", "order", "'context' or 'rotary'", order)
        if order == "rotary" and self.dim % 2:
            refuse("Signer", "dim", "even for the order 'rotary'", dim)
        self.order = order
        self._context_tokens = as_count("Signer", "context_tokens", context_tokens, 0)
        self._context_decay = as_number("Signer", "context_decay", context_decay, 0, 1)
        self._theta = as_number("Signer", "theta", theta, 1, sys.float_info.max)
        seed = as_count("Signer", "seed", seed, 0)
        if seed >= 1 << 64:
            refuse("Signer", "seed", "below 2**64", seed)
        generator = torch.Generator().manual_seed(seed)
        self._planes = torch.randn(self.dim, self.bits, generator=generator).to(device)

    @property
    def device(self) -> torch.device:
        """Return the device that the embeddings must be on."""
        return self._planes.device

    def sign(self, embeddings: torch.Tensor) -> Signatures:
        """Return the signatures of one prompt's tokens.

        Args:
            embeddings: ``[num_tokens, dim]``, what the model's input layer makes of the tokens.

        Returns:
            Two of ``bits`` bits for each token, on the embeddings' device.

        Raises:
            InvalidArgument: the embeddings have another shape.
        """
        wanted = f"[num_tokens, {self.dim}]"
        if not isinstance(embeddings, torch.Tensor):
            refuse("sign", "embeddings", wanted, embeddings)
        if embeddings.dim() != 2 or embeddings.shape[1] != self.dim:
            refuse("sign", "embeddings", wanted, list(embeddings.shape))
        with torch.no_grad():
            wide = embeddings.float()
            placed = (
                with_context(wide, self._context_tokens, self._context_decay)
                if self.order == "context"
                else with_positions(wide, self._theta)
            )
            return Signatures(mk.simhash(wide, self._planes), mk.simhash(placed, self._planes))
