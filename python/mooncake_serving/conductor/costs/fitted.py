"""Cost models whose coefficients are fitted to measurements."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InvalidArgument, check_at_least, check_count
from .fit import as_samples, fit_nonnegative
from .interface import PrefillCost


@dataclass(frozen=True, slots=True)
class PolynomialPrefill:
    """Prefill time as a polynomial of the length and the prefix.

    With ``new = num_tokens - prefix_tokens``::

        seconds = base_s + per_token_s * new + per_pair_s * (num_tokens**2 - prefix_tokens**2) / 2

    The linear layers process each new token once. Attention processes each new token with all
    tokens before it, which is the last term. The paper predicts prefill times by such a regression
    on offline measurements (Mooncake, arXiv 2407.00079, section 6.1).
    """

    base_s: float
    per_token_s: float
    per_pair_s: float

    def __post_init__(self) -> None:
        """Check that more work never takes less time."""
        for name in ("base_s", "per_token_s", "per_pair_s"):
            check_at_least("PolynomialPrefill", name, getattr(self, name), 0)

    def seconds(self, num_tokens: ArrayLike, prefix_tokens: ArrayLike) -> np.ndarray:
        """Predict the prefill of a prompt; see :class:`~.interface.PrefillCost`."""
        tokens, prefix = np.asarray(num_tokens, float), np.asarray(prefix_tokens, float)
        per_token_s = self.per_token_s + self.per_pair_s / 2 * (tokens + prefix)
        return self.base_s + per_token_s * (tokens - prefix)

    @classmethod
    def fit(
        cls, num_tokens: ArrayLike, prefix_tokens: ArrayLike, seconds: ArrayLike
    ) -> "PolynomialPrefill":
        """Fit the three coefficients to measured prefills, by the least relative error.

        Args:
            num_tokens: ``[n]`` lengths of prompts, at least three different ones if their prefixes
                are equally long.
            prefix_tokens: ``[n]``, tokens of them already cached: fewer.
            seconds: ``[n]``, measured.

        Raises:
            InvalidArgument: too few different measurements, or some are not positive and finite; a
                prefix is negative, or not shorter than its prompt.
        """
        op = "PolynomialPrefill.fit"
        tokens, prefix = as_samples(op, num_tokens=num_tokens, prefix_tokens=prefix_tokens)
        (measured,) = as_samples(op, seconds=seconds)
        for place in np.flatnonzero((prefix < 0) | (prefix >= tokens))[:1]:
            what = f"{op}: prefix_tokens must be at least 0, and fewer than num_tokens"
            raise InvalidArgument(f"{what}, got {prefix[place]:g} of {tokens[place]:g} at {place}")
        columns = (np.ones_like(tokens), tokens - prefix, (tokens**2 - prefix**2) / 2)
        features = np.stack(columns, axis=-1)
        fitted = fit_nonnegative(op, features, measured)
        return cls(*map(float, fitted))


@dataclass(frozen=True, slots=True)
class PipelinedPrefill:
    """Prefill in chunks on the stages of a pipeline, each with an equal share of the layers.

    The first stage is occupied by all chunks; the last one is done when the largest chunk, assumed
    to be the last ``chunk_tokens``, has passed the other stages, too::

        seconds = stage(prompt) + (num_stages - 1) * stage(largest chunk)

    A prompt of one chunk gains nothing (Mooncake, FAST'25, section 3.3).

    Attributes:
        stage: one stage's share of a prefill.
        num_stages: nodes of the pipeline.
        chunk_tokens: maximum size of a chunk.
    """

    stage: PrefillCost
    num_stages: int
    chunk_tokens: int

    def __post_init__(self) -> None:
        """Check both numbers."""
        check_count("PipelinedPrefill", "num_stages", self.num_stages, 1)
        check_count("PipelinedPrefill", "chunk_tokens", self.chunk_tokens, 1)

    def seconds(self, num_tokens: ArrayLike, prefix_tokens: ArrayLike) -> np.ndarray:
        """Predict the prefill of a prompt; see :class:`~.interface.PrefillCost`."""
        before = np.maximum(prefix_tokens, np.subtract(num_tokens, self.chunk_tokens))
        chunk_s = self.stage.seconds(num_tokens, before)
        return self.stage.seconds(num_tokens, prefix_tokens) + (self.num_stages - 1) * chunk_s


@dataclass(frozen=True, slots=True)
class LinearDecode:
    """Time of one decoding step, linear in its requests and their tokens.

    ``seconds = base_s + per_request_s * batch_size + per_kv_token_s * kv_tokens``

    The weights are read once (base), each request adds its row to the linear layers, and each
    cached token is read once (Infinite-LLM, arXiv 2401.02669, models a step the same way).
    """

    base_s: float
    per_request_s: float
    per_kv_token_s: float

    def __post_init__(self) -> None:
        """Check that more work never takes less time."""
        for name in ("base_s", "per_request_s", "per_kv_token_s"):
            check_at_least("LinearDecode", name, getattr(self, name), 0)

    def seconds(self, batch_size: ArrayLike, kv_tokens: ArrayLike) -> np.ndarray:
        """Predict one step; see :class:`~.interface.DecodeCost`."""
        requests, tokens = np.asarray(batch_size, float), np.asarray(kv_tokens, float)
        return self.base_s + self.per_request_s * requests + self.per_kv_token_s * tokens

    @classmethod
    def fit(cls, batch_size: ArrayLike, kv_tokens: ArrayLike, seconds: ArrayLike) -> "LinearDecode":
        """Fit the three coefficients to measured steps, by the least relative error.

        Args:
            batch_size: ``[n]`` requests in the step, at least two different numbers.
            kv_tokens: ``[n]`` tokens that they attend to in total, not always as many a request.
            seconds: ``[n]``, measured.

        Raises:
            InvalidArgument: too few different measurements, or some are not positive and finite; a
                step has no request, or a negative number of tokens.
        """
        op = "LinearDecode.fit"
        requests, tokens = as_samples(op, batch_size=batch_size, kv_tokens=kv_tokens)
        (measured,) = as_samples(op, seconds=seconds)
        for place in np.flatnonzero((requests < 1) | (tokens < 0))[:1]:
            what = f"{op}: batch_size must be at least 1, and kv_tokens at least 0"
            got = f"{requests[place]:g} and {tokens[place]:g} at {place}"
            raise InvalidArgument(f"{what}, got {got}")
        features = np.stack((np.ones_like(requests), requests, tokens), axis=-1)
        fitted = fit_nonnegative(op, features, measured)
        return cls(*map(float, fitted))
