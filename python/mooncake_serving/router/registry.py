"""A list of engines that routers share: one value of a metadata server, changed by conditions."""

import copy
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from mooncake_kernels.metadata import KeptPublication, open_store

from .call import NO_JSON
from .config import RegistryConfig

SERVING, DRAINING, STOPPED, GONE = "serving", "draining", "stopped", "gone"
CLAIM_MS = 10_000  # after which the change of a router that was killed counts as given up
KEEP_MS = 10 * 365 * 86_400_000  # a server's values all expire
MOST_GONE = 1000  # that are remembered
ATTEMPTS = 20  # while other routers change other engines


class Record(msgspec.Struct):
    """What routers know of an engine.

    Attributes:
        instance: its table, as in a file.
        state: SERVING; DRAINING: a router changes it, and none sends it requests; STOPPED: none
            does until it registers again; GONE: it was unregistered, as a router must know that
            tells a server what it has lost.
        drain_s: after which requests that it has while it drains are given up.
        busy: routers that have requests there while it drains.
    """

    instance: dict[str, Any]
    state: str = SERVING
    drain_s: float = 0.0
    busy: list[str] = []


class _Document(msgspec.Struct):
    """All of a namespace. A server that has lost it gets one with another id."""

    id: str
    revision: int
    engines: dict[str, Record]


class Registry:
    """The shared list, by calls that block. To be used by one thread at a time.

    Attributes:
        router: the name of this router among those that share the list.

    Raises:
        Unavailable: redis-py is not installed; of each call: the server does not answer, or its
            value is not a list of engines.
    """

    def __init__(self, config: RegistryConfig):
        self.router = secrets.token_hex(8)
        self._url, self._store = config.url, open_store(config.url)
        self._key = f"{config.url.prefix}routers/{config.namespace}"
        self._last = _Document("", 0, {})

    def claim(self, name: str) -> KeptPublication | None:
        """Be the one router that changes an engine, until this is closed; None: another one is."""
        key, value = self._claim_key(name), self.router.encode()
        if not self._store.create(key, value, CLAIM_MS):
            return None
        return KeptPublication(self._store, key, value, CLAIM_MS)

    def is_claimed(self, name: str) -> bool:
        """Whether a router is changing an engine."""
        return self._store.get(self._claim_key(name)) is not None

    def change(self, edit: Callable[[dict[str, Record]], None]) -> dict[str, Record]:
        """Have the list edited, again if it changes meanwhile; nothing is written for no change.

        A server that has lost the list, or part of what this router has seen, is told it again.

        Returns:
            The list by engines' names, as it is then.
        """
        for _ in range(ATTEMPTS):
            held = self._store.get(self._key)
            before = _Document("", 0, {}) if held is None else self._decode(held)
            now = self._newest(before)
            edit(now.engines)
            if now.engines == before.engines:
                self._last = before
                return before.engines
            gone = [name for name, record in now.engines.items() if record.state == GONE]
            for name in gone[:-MOST_GONE]:
                del now.engines[name]
            now.revision += 1
            value = msgspec.json.encode(now)
            if (
                self._store.create(self._key, value, KEEP_MS)
                if held is None
                else self._store.replace(self._key, held, value, KEEP_MS)
            ):
                self._last = now
                return now.engines
        raise self._url.error(f"{self._key} changes all the time")

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._store.close()

    def _newest(self, held: _Document) -> _Document:
        """Return a copy of a document with what the server has lost of it since it was seen."""
        if held.id and held.id == self._last.id:
            return copy.deepcopy(max(held, self._last, key=lambda each: each.revision))
        engines = copy.deepcopy(self._last.engines | held.engines)
        return _Document(held.id or secrets.token_hex(8), held.revision, engines)

    def _decode(self, value: bytes) -> _Document:
        try:
            return msgspec.json.decode(value, type=_Document)
        except NO_JSON as error:
            raise self._url.error(f"{self._key} is no list of engines: {error}") from None

    def _claim_key(self, name: str) -> str:
        return f"{self._key}/changing/{name}"
