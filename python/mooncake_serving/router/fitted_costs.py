"""Cost models that follow what is measured."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from mooncake_serving.conductor import InvalidArgument, LinearDecode, PolynomialPrefill

MIN_SAMPLES = 8  # of three coefficients
MAX_SAMPLES = 512  # the last ones
LEAST_S = 1e-9
KEPT_SHARE = 0.9  # of the samples, those that a first fit predicts best: others were disturbed


class _Model(Protocol):
    def seconds(self, __first: Any, __second: Any) -> np.ndarray: ...


M = TypeVar("M", bound=_Model)


class _Fitted(Generic[M]):
    """A model of two numbers of a sample, fitted anew from time to time.

    Samples that cannot tell its coefficients apart, such as prompts of one length, scale the
    assumed model by the median of measured over predicted seconds.
    """

    def __init__(self, assumed: M, fit: Callable[..., M]):
        self._assumed, self._fit = assumed, fit
        self._samples: deque[tuple[float, float, float]] = deque(maxlen=MAX_SAMPLES)
        self._num_new = 0
        self.model = assumed
        self.source = "assumed"

    def observe(self, first: float, second: float, seconds: float) -> None:
        """Add a measured sample; its seconds are positive."""
        self._samples.append((first, second, seconds))
        self._num_new += 1

    def refit(self) -> None:
        """Fit the model to the last samples, if there are new ones, and enough of them."""
        if not self._num_new or len(self._samples) < MIN_SAMPLES:
            return
        self._num_new = 0
        samples = np.array(self._samples)
        try:
            model = self._fit(*samples.T)
            error = np.abs(np.log(self._ratio(model, samples)))
            kept = samples[np.argsort(error)[: max(MIN_SAMPLES, int(len(samples) * KEPT_SHARE))]]
            self.model, self.source = self._fit(*kept.T), "fitted"
        except InvalidArgument:
            scale = float(np.median(1 / self._ratio(self._assumed, samples)))
            self.model, self.source = _scaled(self._assumed, scale), "scaled"

    def as_dict(self) -> dict[str, Any]:
        """Return the coefficients, and how well they predict the samples."""
        told = {
            "source": self.source,
            "num_samples": len(self._samples),
            **{name: getattr(self.model, name) for name in _coefficients(self.model)},
        }
        if self._samples:
            samples = np.array(self._samples)
            ratio = self._ratio(self.model, samples)
            told["median_error"] = float(np.median(np.abs(ratio - 1)))
        return told

    @staticmethod
    def _ratio(model: M, samples: np.ndarray) -> np.ndarray:
        """Predicted over measured seconds, which is positive."""
        predicted = model.seconds(samples[:, 0], samples[:, 1])
        return np.maximum(predicted, LEAST_S) / samples[:, 2]


class FittedPrefill(_Fitted[PolynomialPrefill]):
    """The prefill of a prompt, by its length and what of it is cached.

    Args:
        assumed: the three coefficients of ``PolynomialPrefill`` until there are samples.
    """

    def __init__(self, assumed: Sequence[float]):
        super().__init__(PolynomialPrefill(*assumed), PolynomialPrefill.fit)

    def seconds(self, num_tokens: ArrayLike, prefix_tokens: ArrayLike) -> np.ndarray:
        """Predict a prefill; see :class:`~mooncake_serving.conductor.PrefillCost`."""
        return self.model.seconds(num_tokens, prefix_tokens)


class FittedDecode(_Fitted[LinearDecode]):
    """A decoding step, by its requests and their tokens.

    Args:
        assumed: the three coefficients of ``LinearDecode`` until there are samples.
    """

    def __init__(self, assumed: Sequence[float]):
        super().__init__(LinearDecode(*assumed), LinearDecode.fit)

    def seconds(self, batch_size: ArrayLike, kv_tokens: ArrayLike) -> np.ndarray:
        """Predict a step; see :class:`~mooncake_serving.conductor.DecodeCost`."""
        return self.model.seconds(batch_size, kv_tokens)


def _coefficients(model: Any) -> Sequence[str]:
    return type(model).__slots__  # of a dataclass: its fields


def _scaled(model: M, scale: float) -> M:
    return type(model)(*(getattr(model, name) * scale for name in _coefficients(model)))
