"""Least squares with non-negative coefficients: more work never takes less time."""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import ArrayLike

from ..errors import InvalidArgument


def as_samples(op: str, **values: ArrayLike) -> Sequence[np.ndarray]:
    """Return each argument as float64 ``[n]``; a number stands for n equal ones.

    Raises:
        InvalidArgument: they are not numbers, or not of one length.
    """
    try:
        arrays = np.broadcast_arrays(*(np.asarray(value, float) for value in values.values()))
    except (TypeError, ValueError, OverflowError) as error:
        what = f"{op}: {' and '.join(values)} must be numbers, equally many, got {error}"
        raise InvalidArgument(what) from None
    if arrays[0].ndim != 1:
        what = f"{op}: {' and '.join(values)} must be of one dimension, got {arrays[0].ndim}"
        raise InvalidArgument(what)
    return arrays


def fit_nonnegative(op: str, features: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Fit ``features @ coefficients`` to ``seconds`` with coefficients of at least 0.

    It minimizes the sum of squares of the *relative* errors: a model must be as accurate for 50 ms
    as for 30 s. There are few features, so each subset of them is fitted, and the best one without
    a negative coefficient is the optimum.

    Args:
        op: named in errors.
        features: ``[num_samples, num_features]``.
        seconds: ``[num_samples]``, positive.

    Raises:
        InvalidArgument: not enough samples, or too much alike to tell the features apart; or
            seconds that are not positive and finite.
    """
    num_samples, num_features = features.shape
    if num_samples < num_features:
        raise InvalidArgument(f"{op}: samples must be at least {num_features}, got {num_samples}")
    if seconds.shape != (num_samples,):
        what = f"{op}: seconds must be {num_samples}, one a sample, got shape {seconds.shape}"
        raise InvalidArgument(what)
    for place in np.flatnonzero(~(np.isfinite(seconds) & (seconds > 0)))[:1]:
        what = f"{op}: seconds must be positive and finite, got {seconds[place]} at {place}"
        raise InvalidArgument(what)
    for place in np.flatnonzero(~np.isfinite(features).all(axis=1))[:1]:
        raise InvalidArgument(f"{op}: samples must be finite, got {features[place]} at {place}")
    scale = np.maximum(features.max(axis=0), 1e-300)  # columns may differ by 10**10
    rank = int(np.linalg.matrix_rank(features / scale))
    if rank < num_features:
        what = f"{op}: samples must tell {num_features} coefficients apart"
        raise InvalidArgument(f"{what}, got {num_samples} that tell {rank}")
    rows = features / scale / seconds[:, None]
    best, best_error = np.zeros(num_features), np.inf
    for size in range(1, num_features + 1):
        for chosen in combinations(range(num_features), size):
            part = np.linalg.lstsq(rows[:, chosen], np.ones(num_samples), rcond=None)[0]
            error = float(np.sum((rows[:, chosen] @ part - 1) ** 2))
            if (part >= 0).all() and error < best_error:
                best, best_error = np.zeros(num_features), error
                best[list(chosen)] = part
    return best / scale
