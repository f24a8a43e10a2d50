"""From logits to the next token of each request."""

import numbers
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mooncake_kernels.errors import InvalidArgument, shown

from .errors import NotFinite


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends.

    Args:
        temperature: 0 takes the likeliest token; otherwise logits are divided by it.
        top_k: draw from the k likeliest tokens; 0: from all.
        top_p: draw from the fewest likeliest tokens whose probabilities reach this sum.
        seed: of 64 bits: makes the draws repeatable, on any engine; None: each request gets its
            own.
        max_tokens: the request ends after this many tokens, finish reason "length".
        stop_token_ids: end the request as the model's eos tokens do, finish reason "stop".
        ignore_eos: do not end at eos tokens, for benchmarks.

    Raises:
        InvalidArgument: an argument out of range; the message names it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Check types and ranges; NaN is refused. Real numbers become floats."""
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if not _is(numbers.Real, value):
                _refuse(name, "a number", value)
            try:
                object.__setattr__(self, name, float(value))
            except OverflowError:
                _refuse(name, "finite", value)
        for name in ("top_k", "max_tokens"):
            if not _is(numbers.Integral, getattr(self, name)):
                _refuse(name, "an integer", getattr(self, name))
        if self.seed is not None:
            if not _is(numbers.Integral, self.seed):
                _refuse("seed", "an integer or None", self.seed)
            if not -(1 << 63) <= self.seed < 1 << 64:
                _refuse("seed", "in [-2**63, 2**64)", self.seed)
        stops = self.stop_token_ids
        if isinstance(stops, str) or not isinstance(stops, Collection):
            _refuse("stop_token_ids", "a tuple of token ids", stops)
        if not all(_is(numbers.Integral, token_id) for token_id in stops):
            _refuse("stop_token_ids", "a tuple of token ids", stops)
        if not isinstance(self.ignore_eos, bool):
            _refuse("ignore_eos", "True or False", self.ignore_eos)
        if not 0 <= self.temperature < float("inf"):
            _refuse("temperature", ">= 0 and finite", self.temperature)
        if self.top_k < 0:
            _refuse("top_k", ">= 0", self.top_k)
        if not 0 < self.top_p <= 1:
            _refuse("top_p", "in (0, 1]", self.top_p)
        if self.max_tokens < 1:
            _refuse("max_tokens", ">= 1", self.max_tokens)


class Draw(NamedTuple):
    """Identify one random choice: the token of this index in a request with this seed.

    The choice depends on nothing else, so a request may continue on another engine.
    """

    params: SamplingParams
    seed: int
    token_index: int


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Choose one token per row; waits for the device.

    Args:
        logits: ``[len(draws), vocab_size]``, any float dtype.
        draws: how to choose in each row.

    Raises:
        InvalidArgument: as many draws as rows are needed.
        NotFinite: rows contain NaN or an infinity above all else; nothing was chosen.
    """
    if logits.shape[0] != len(draws):
        raise InvalidArgument(
            f"sample: draws must have {logits.shape[0]} entries, got {len(draws)}"
        )
    best = logits.argmax(dim=-1)  # of a NaN, if there is one
    is_finite = logits.gather(-1, best[:, None])[:, 0].isfinite()
    token_ids, finite = torch.stack((best, is_finite.long())).tolist()  # one wait for both
    if not all(finite):
        raise NotFinite("sample", [row for row, good in enumerate(finite) if not good])
    for row, draw in enumerate(draws):
        if draw.params.temperature > 0:
            token_ids[row] = _draw(logits[row], draw)
    return token_ids


def _draw(logits: torch.Tensor, draw: Draw) -> int:
    """Invert the cumulative distribution, likeliest token first, at a uniform number."""
    params = draw.params
    count = min(params.top_k or logits.numel(), logits.numel())
    values, token_ids = logits.float().topk(count)
    # In float64: in float32 a temperature below 1e-45 is 0.
    probabilities = ((values - values[0]).double() / params.temperature).softmax(dim=-1)
    sums = probabilities.cumsum(dim=-1)
    kept = int(
        (sums - probabilities < params.top_p).sum()
    )  # a token stays if the sum of those before is below top_p
    uniform = random.Random(f"{draw.seed}:{draw.token_index}").random()
    index = int(torch.searchsorted(sums[:kept], uniform * float(sums[kept - 1]), right=True))
    return int(token_ids[min(index, kept - 1)])


def _is(kind: type, value: object) -> bool:
    """Tell whether it is a number of a kind; a bool is refused, as a likely mistake."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _refuse(name: str, wanted: str, value: object) -> None:
    raise InvalidArgument(f"SamplingParams: {name} must be {wanted}, got {shown(value)}")
