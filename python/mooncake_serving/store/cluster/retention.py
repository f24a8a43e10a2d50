"""How long pools keep objects, and where those belong in their prompts: what a put says of each."""

from typing import Any

import numpy as np

from mooncake_kernels.pool import ObjectPool, PoolObjects, Retention

from ..object_list import RETENTIONS

# The index in RETENTIONS, and the position, both as in ``PoolObjects``: a row for each object.
KEPT = np.dtype([("retention", "u1"), ("position", "<u2")])
NORMAL = RETENTIONS.index("normal")
HARD = RETENTIONS.index("hard")
MAX_POSITION = (1 << 16) - 1


def kept_alike(num_objects: int, retention: Retention = "normal") -> np.ndarray:
    """``[n]`` of ``KEPT`` for objects whose positions are unknown."""
    kept = np.zeros(num_objects, KEPT)
    kept["retention"] = RETENTIONS.index(retention)
    return kept


def kept_in_order(num_objects: int, retention: Retention, position: int) -> np.ndarray:
    """``[n]`` of ``KEPT`` for consecutive objects of a prompt; ``position`` is of the first."""
    kept = kept_alike(num_objects, retention)
    first = min(int(position), MAX_POSITION)
    kept["position"] = np.minimum(first + np.arange(num_objects), MAX_POSITION)
    return kept


def kept_of(objects: PoolObjects) -> np.ndarray:
    """``[n]`` of ``KEPT``: how a pool keeps its objects."""
    kept = np.zeros(len(objects.keys), KEPT)
    kept["retention"], kept["position"] = objects.retention, objects.position
    return kept


def kept_in(pool: ObjectPool, keys: np.ndarray) -> np.ndarray:
    """``[n]`` of ``KEPT``: how a pool keeps ``[n, 2]`` objects; normally those that it does not
    have. It looks at every object of the pool.
    """
    objects = pool.objects()
    asked = np.flatnonzero(np.isin(objects.keys[:, 0], keys[:, 0]))
    found = kept_of(objects)[asked]
    rows = {tuple(key): row for key, row in zip(objects.keys[asked].tolist(), found, strict=True)}
    kept = np.zeros(len(keys), KEPT)
    for i, key in enumerate(keys.tolist()):
        kept[i] = rows.get(tuple(key), kept[i])
    return kept


def put_options(kept: np.void) -> dict[str, Any]:
    """A row of ``KEPT`` as the arguments of a put."""
    return {"retention": RETENTIONS[kept["retention"]], "position": int(kept["position"])}
