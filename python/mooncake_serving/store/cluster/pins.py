"""Objects of this pool that other nodes read: pinned until the reader releases them, or is gone."""

import threading
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_kernels.errors import ChecksumError, Unavailable
from mooncake_kernels.pool import Key, PinnedObject
from mooncake_kernels.transfer import Window

from ..checks import is_whole
from ..store import Store
from .messages import ABSENT, BUSY, DAMAGED, FOUND, PINNED

MAX_PINNED_BYTES = (
    256 << 20
)  # of a token, and one object more: what can be compared and read in time

Token = tuple[str, int, int]  # name of the reader, its life, number of its request


@dataclass
class _Held:
    objects: list[tuple[PinnedObject, Window | None]]
    since: float
    until: float

    def release(self) -> None:
        """Hide the objects from peers, then let them go: their memory may be used again."""
        for pinned, window in self.objects:
            if window is not None:
                window.close()
            pinned.close()


class Pins:
    """Pins by token. Thread-safe.

    Only pinned objects can be read by address, and what they were cannot be any more.

    Args:
        store: whose objects are pinned, wherever it keeps them.
        show: lets peers read a range of the pool, of its address and size.
        drop: is called with ``[n, 2]`` keys of objects that turned out to be damaged.
    """

    def __init__(
        self,
        store: Store,
        show: Callable[[int, int], Window],
        drop: Callable[[np.ndarray], object],
    ):
        self._store = store
        self._show = show
        self._drop = drop
        self._held: dict[Token, _Held] = {}
        self._lock = threading.Lock()

    def pin(self, token: Token, keys: np.ndarray, *, verify: bool, keep_s: float) -> np.ndarray:
        """Pin those of ``[n, 2]`` keys that exist, for ``keep_s`` at most: ``[n]`` of ``FOUND``.

        If there are none, nothing needs to be released.
        """
        now = time.monotonic()
        held = _Held([], now, now + keep_s)
        found = np.zeros(len(keys), FOUND)
        num_bytes = 0
        # From the last to the first, as stores read: LRU then evicts the tail of a prompt first.
        for row, key in zip(found[::-1], keys[::-1].tolist(), strict=True):
            if num_bytes >= MAX_PINNED_BYTES:
                row["status"] = BUSY
                continue
            try:
                pinned = self._pin(tuple(key), verify)
            except Unavailable:  # this process has as many pins as it can
                row["status"] = BUSY
                continue
            except ChecksumError:
                row["status"] = DAMAGED
                continue
            if pinned is None:  # on a disk: there is no room to load it while others are being read
                row["status"] = BUSY if self._has(key) else ABSENT
            else:
                held.objects.append((pinned, self._window(pinned)))
                num_bytes += pinned.num_bytes
                row["status"], row["num_bytes"] = PINNED, pinned.num_bytes
                row["checksum"] = pinned.checksum or 0
                row["address"] = pinned.buffer.address if pinned.num_bytes else 0
        if (damaged := found["status"] == DAMAGED).any():
            self._drop(keys[damaged])
        self._keep(token, held)
        return found

    def _pin(self, key: Key, verify: bool) -> PinnedObject | None:
        """Pin an object; one that is damaged in the pool may be on a disk behind it.

        Raises:
            ChecksumError: every copy here is damaged.
            Unavailable: this process has as many pins as it can.
        """
        pinned = self._store.pin_key(key)
        if pinned is None or not verify or is_whole(pinned):
            return pinned
        pinned.close()
        if not self._store.is_pool_all:
            self._store.remove_damaged(key)
            pinned = self._store.pin_key(key)
            if pinned is None and self._has(key):
                return None
            if pinned is not None and is_whole(pinned):
                return pinned
            if pinned is not None:
                pinned.close()
        raise ChecksumError(f"object {key} is damaged wherever it is")

    def _window(self, pinned: PinnedObject) -> Window | None:
        if pinned.num_bytes == 0:
            return None
        try:
            return self._show(pinned.buffer.address, pinned.num_bytes)
        except BaseException:
            pinned.close()
            raise

    def _has(self, key: Sequence[int]) -> bool:
        return bool(self._store.has_keys(np.array([key], np.uint64))[0])

    def release(self, token: Token) -> bool:
        """End a token's pins; returns whether they were held until now."""
        return self._release_if(lambda other, _: other == token) > 0

    def release_gone(self, living: Container[str], grace_s: float) -> None:
        """Release the pins of readers that are not members.

        A token that is younger than ``grace_s`` stays: a directory that was restarted does not know
        its members yet.
        """
        now = time.monotonic()
        self._release_if(lambda token, held: token[0] not in living and now > held.since + grace_s)

    def release_late(self) -> None:
        """Release pins that were kept too long."""
        now = time.monotonic()
        self._release_if(lambda _, held: now > held.until)

    def num_tokens(self) -> int:
        """Number of tokens with pins; a token that is not counted any more has none left."""
        with self._lock:
            return len(self._held)

    def close(self) -> None:
        """Release everything."""
        self._release_if(lambda token, held: True)

    def _keep(self, token: Token, held: _Held) -> None:
        reader, life, _ = token
        # An earlier process of that name is gone, and no reader uses a number twice.
        self._release_if(
            lambda other, _: other == token or (other[0] == reader and other[1] != life)
        )
        if held.objects:
            with self._lock:
                self._held[token] = held

    def _release_if(self, condition: Callable[[Token, _Held], bool]) -> int:
        """Release the tokens that meet a condition, and return their number."""
        with self._lock:
            gone = [token for token, held in self._held.items() if condition(token, held)]
            for token in gone:
                self._held[token].release()
                del self._held[token]
        return len(gone)
