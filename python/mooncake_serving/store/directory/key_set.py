"""A set of keys that can be scanned, a part at a time, while it changes."""

from collections.abc import Iterator


class KeySet:
    """Keys in a list, and the position of each: the time of a call does not depend on their number.

    A scan goes down from the end. The last key takes the place of a removed one, so a key can only
    move to a place that was not scanned yet: it may be returned twice, but is never missed.
    """

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._index: dict[bytes, int] = {}

    def add(self, key: bytes) -> None:
        if key not in self._index:
            self._index[key] = len(self._keys)
            self._keys.append(key)

    def discard(self, key: bytes) -> None:
        index = self._index.pop(key, None)
        if index is None:
            return
        last = self._keys.pop()
        if last != key:
            self._keys[index] = last
            self._index[last] = index

    def scan(self, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """Return the next cursor and up to count keys; 0 is both the first cursor and the end."""
        end = min(cursor, len(self._keys)) if cursor else len(self._keys)
        start = max(0, end - count)
        return start, self._keys[start:end]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
