"""Objects to be put: their keys, their memory, how long pools keep them, and their positions."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mooncake_kernels.buffers import Buffer
from mooncake_kernels.pool import ObjectPool, PoolObjects, Retention

from ..checks import RETENTIONS, check_number, check_retention

# The index in RETENTIONS, and the position, both as in ``PoolObjects``: a row for each object.
PUT_OPTIONS = np.dtype([("retention", "u1"), ("position", "<u2")])
NORMAL = RETENTIONS.index("normal")
HARD = RETENTIONS.index("hard")
MAX_POSITION = (1 << 16) - 1


class PutBatch(NamedTuple):
    """Objects to be put.

    Attributes:
        words: ``[n, 2]`` keys of the pool.
        objects: the parts of each, in order.
        options: ``[n]`` of ``PUT_OPTIONS``: how they are kept.
    """

    words: np.ndarray
    objects: Sequence[Sequence[Buffer]]
    options: np.ndarray

    def at(self, indices: Sequence[int]) -> "PutBatch":
        """Those with these indices."""
        chosen = [self.objects[i] for i in indices]
        return PutBatch(self.words[indices], chosen, self.options[indices])


def uniform_options(num_objects: int, retention: Retention = "normal") -> np.ndarray:
    """``[n]`` of ``PUT_OPTIONS`` for objects whose positions are unknown."""
    options = np.zeros(num_objects, PUT_OPTIONS)
    options["retention"] = RETENTIONS.index(retention)
    return options


def prompt_options(op: str, num_objects: int, retention: Retention, position: int) -> np.ndarray:
    """``[n]`` of ``PUT_OPTIONS`` for consecutive objects of a prompt, the first at ``position``.

    Raises:
        InvalidArgument: from ``op``: the retention or the position is not one.
    """
    if type(retention) is not str or retention not in RETENTIONS:
        check_retention(op, retention)
    if type(position) is not int or not 0 <= position <= MAX_POSITION:
        check_number(op, "position", position)
    first = min(int(position), MAX_POSITION)
    options = np.zeros(num_objects, PUT_OPTIONS)
    options["retention"] = RETENTIONS.index(retention)
    options["position"] = np.minimum(first + np.arange(num_objects), MAX_POSITION)
    return options


def options_of(objects: PoolObjects) -> np.ndarray:
    """``[n]`` of ``PUT_OPTIONS``: how a pool keeps its objects."""
    options = np.zeros(len(objects.keys), PUT_OPTIONS)
    options["retention"], options["position"] = objects.retention, objects.position
    return options


def options_in(pool: ObjectPool, keys: np.ndarray) -> np.ndarray:
    """``[n]`` of ``PUT_OPTIONS``: how a pool keeps ``[n, 2]`` objects; normally those that it does
    not have. It looks at every object of the pool.
    """
    objects = pool.objects()
    asked = np.flatnonzero(np.isin(objects.keys[:, 0], keys[:, 0]))
    found = options_of(objects)[asked]
    rows = {tuple(key): row for key, row in zip(objects.keys[asked].tolist(), found, strict=True)}
    options = np.zeros(len(keys), PUT_OPTIONS)
    for i, key in enumerate(keys.tolist()):
        options[i] = rows.get(tuple(key), options[i])
    return options


def put_arguments(options: np.void) -> dict[str, Any]:
    """A row of ``PUT_OPTIONS`` as the arguments of a put."""
    return {"retention": RETENTIONS[options["retention"]], "position": int(options["position"])}
