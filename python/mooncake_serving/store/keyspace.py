"""Map callers' keys to keys of a pool: the owner of an object is part of its key."""

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_kernels.errors import InvalidArgument, shown
from mooncake_kernels.pool import Key, named_keys, object_key, object_keys

StoreKey = str | bytes | int | np.integer
StoreKeys = Sequence[StoreKey] | np.ndarray

NAMES = {str}
SPREAD = np.uint64(0x9E3779B97F4A7C15)


class Keyspace:
    """The keys of one namespace: integers are prefix hashes, strings are names.

    Args:
        namespace: tenant, model, layout, rank: whatever distinguishes objects of equal hashes.

    Attributes:
        scope: the second word of keys that are prefix hashes.
    """

    def __init__(self, namespace: str):
        if not isinstance(namespace, str):
            raise InvalidArgument(f"Store: namespace must be a str, got {namespace!r}")
        self.scope = int(object_keys([0], namespace)[0, 1])

    def key(self, key: StoreKey, op: str = "Store") -> Key:
        """``(hash, scope)`` of one key; errors name the call ``op``."""
        if type(key) is str or isinstance(key, str | bytes):
            try:
                return object_key(key, self.scope)
            except InvalidArgument:
                raise _wrong_key(op, key) from None
        try:
            word = -1 if isinstance(key, bool) else operator.index(key)
        except TypeError:
            word = -1
        if not 0 <= word < 1 << 64:
            raise _wrong_key(op, key)
        return word, self.scope

    def row(self, key: StoreKey, op: str = "Store") -> np.ndarray:
        """``[1, 2]`` uint64 of one key."""
        if isinstance(key, str | bytes):
            try:
                return named_keys((key,), self.scope)
            except InvalidArgument:
                raise _wrong_key(op, key) from None
        return np.array([self.key(key, op)], np.uint64)

    def keys(self, keys: StoreKeys, op: str = "Store") -> np.ndarray:
        """``[n, 2]`` uint64 of many keys."""
        check_keys(op, keys)
        try:
            return self._keys(keys)
        except InvalidArgument:
            raise InvalidArgument(
                f"{op}: keys must be [n] names or integers from 0 to 2**64 - 1, got {keys!r:.80}"
            ) from None

    def _keys(self, keys: StoreKeys) -> np.ndarray:
        if isinstance(keys, np.ndarray):
            return object_keys(keys, self.scope)
        kinds = set(map(type, keys))
        if kinds == NAMES:  # usually
            return named_keys(keys, self.scope)  # type: ignore[arg-type]
        if kinds & {bool, np.bool_}:  # among integers it would be one
            raise InvalidArgument("keys must not be bools")
        are_names = {issubclass(kind, str | bytes) for kind in kinds}
        if are_names == {True}:
            return named_keys(keys, self.scope)  # type: ignore[arg-type]
        if are_names == {True, False}:
            return np.array([self.key(key) for key in keys], np.uint64).reshape(-1, 2)
        return object_keys(keys, self.scope)


def _wrong_key(op: str, key: Any) -> InvalidArgument:
    is_name = isinstance(key, str)
    what = "text that UTF-8 can hold" if is_name else "a name or an integer from 0 to 2**64 - 1"
    return InvalidArgument(f"{op}: key must be {what}, got {shown(key)}")


def check_keys(op: str, keys: Any) -> None:
    """Refuse a single key, or anything else that is not many keys."""
    if isinstance(keys, str | bytes) or not hasattr(keys, "__len__"):
        raise InvalidArgument(f"{op}: keys must be a list or an array of keys, got {keys!r:.80}")


def are_in(keys: np.ndarray, others: np.ndarray) -> np.ndarray:
    """``[n]`` bool: which of ``[n, 2]`` keys of pools are among others."""
    return np.isin(fingerprints(keys), fingerprints(others))


def fingerprints(keys: np.ndarray) -> np.ndarray:
    """One word per key: the same hash is in many scopes, and both words are random bits."""
    return keys[:, 0] ^ (keys[:, 1] * SPREAD)
