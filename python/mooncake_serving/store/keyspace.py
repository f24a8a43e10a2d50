"""Map callers' keys to keys of a pool, whose owner is part of them; keys of a pool as text."""

import operator
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_kernels.errors import InvalidArgument, shown
from mooncake_kernels.pool import Key, hash_name, hash_names, object_keys

StoreKey = str | bytes | int | np.integer
StoreKeys = Sequence[StoreKey] | np.ndarray

NAMES = {str}
NUM_DIGITS = 32  # of a key as text and in URLs: hexadecimal, the hash first
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
                first, second = hash_name(key)
            except (TypeError, UnicodeError):
                raise _wrong_key(op, key) from None
            return first, second ^ self.scope
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
                return hash_names((key,), self.scope)
            except (TypeError, UnicodeError):
                raise _wrong_key(op, key) from None
        return np.array([self.key(key, op)], np.uint64)

    def keys(self, keys: StoreKeys, op: str = "Store") -> np.ndarray:
        """``[n, 2]`` uint64 of many keys."""
        check_keys(op, keys)
        try:
            return self._keys(keys)
        except (InvalidArgument, TypeError, UnicodeError):
            raise InvalidArgument(
                f"{op}: keys must be [n] names or integers from 0 to 2**64 - 1, got {keys!r:.80}"
            ) from None

    def _keys(self, keys: StoreKeys) -> np.ndarray:
        if isinstance(keys, np.ndarray):
            return object_keys(keys, self.scope)
        kinds = set(map(type, keys))
        if kinds == NAMES:  # usually
            return hash_names(keys, self.scope)  # type: ignore[arg-type]
        if kinds & {bool, np.bool_}:  # among integers it would be one
            raise InvalidArgument("keys must not be bools")
        are_names = {issubclass(kind, str | bytes) for kind in kinds}
        if are_names == {True}:
            return hash_names(keys, self.scope)  # type: ignore[arg-type]
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


def words_of(keys: np.ndarray) -> list[bytes]:
    """Keys as elements of a set."""
    if len(keys) == 1:
        return [keys.tobytes()]
    return np.ascontiguousarray(keys, np.uint64).view("V16").reshape(-1).tolist()


def key_text(key: Key) -> str:
    """Format a key: ``0x`` and 32 hexadecimal digits, the hash first."""
    return f"0x{int(key[0]):016x}{int(key[1]):016x}"


def parse_key(op: str, text: str, *, argument: str = "key") -> Key:
    """Parse a key, with or without ``0x``.

    Raises:
        InvalidArgument: it is not 32 hexadecimal digits.
    """
    digits = parse_digits(op, argument, text)
    if len(digits) != NUM_DIGITS:
        raise InvalidArgument(
            f"{op}: {argument} must be {NUM_DIGITS} hexadecimal digits, got {text!r:.80}"
        )
    return int(digits[:16], 16), int(digits[16:], 16)


def parse_digits(op: str, argument: str, text: str) -> str:
    """Check the first digits of a key, maybe none; return them in lower case, without ``0x``.

    Raises:
        InvalidArgument: it is not up to 32 hexadecimal digits.
    """
    digits = text.lower().removeprefix("0x")
    if not re.fullmatch(f"[0-9a-f]{{0,{NUM_DIGITS}}}", digits):
        raise InvalidArgument(
            f"{op}: {argument} must be up to {NUM_DIGITS} hexadecimal digits, got {text!r:.80}"
        )
    return digits
