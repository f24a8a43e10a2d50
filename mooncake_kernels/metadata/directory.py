"""The engines in a metadata server, of any kind, or in none."""

import contextlib
import dataclasses
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .. import config
from ..errors import InvalidArgument, Unavailable, shown
from .base import Metadata, Publication, Store
from .entry import PROTOCOL, Entry, decode, decode_segment, encode
from .untrusted import Malformed

NAME = re.compile(r"[!-.0-~]{1,255}")  # part of a Hello, and of a key
ATTEMPTS = 8  # to take a name that other engines take and release meanwhile

REFRESHED = "is published again"
TAKEN = "is another engine's by now"
AWAY = "cannot be refreshed"

_log = logging.getLogger(__name__)


class Directory(Metadata):
    """Names and addresses of engines. Thread-safe.

    Keys are Mooncake's: ``<prefix>rpc_meta/<name>`` is an engine, ours or Mooncake's, and
    ``<prefix>ram/<name>`` a Mooncake engine's segment.
    """

    def __init__(self, url: str, store: Store, prefix: str):
        self.url = url
        self._store = store
        self._engines = f"{prefix}rpc_meta/"
        self._segments = f"{prefix}ram/"

    def check_name(self, op: str, name: Any) -> str:
        """Return the name if it is valid for an engine; raise ``InvalidArgument`` if not."""
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise InvalidArgument(
                f"{op}: name must be 1 to 255 printable ASCII characters other than space and /, "
                f"got {shown(name)}"
            )
        return name

    def lookup(self, name: str) -> Entry | None:
        """Find an engine.

        Args:
            name: of the engine.

        Returns:
            Its entry; None if there is none, or it has expired.

        Raises:
            InvalidArgument: the name is not valid.
            Unavailable: the server does not answer, or its value is not an entry.
        """
        key = self._engines + self.check_name("lookup", name)
        with self._naming(name):
            value = self._store.get(key)
            return None if value is None else self._decode(name, value)

    def entries(self) -> list[Entry]:
        """List the engines, by name. Invalid entries are skipped and logged.

        Raises:
            Unavailable: the server does not answer, or does not support lists.
        """
        entries = []
        for key in sorted(self._store.keys(self._engines)):
            name = key.removeprefix(self._engines)
            try:
                entry = self.lookup(name)
            except (Malformed, InvalidArgument) as error:
                _log.warning("left out: %s", error)
                continue
            if entry is not None:
                entries.append(entry)
        return entries

    def publish(self, entry: Entry, is_gone: Callable[[Entry], bool]) -> Publication:
        """Publish an engine until the publication is closed.

        Args:
            entry: the engine.
            is_gone: whether an engine that holds the name is certainly gone.

        Raises:
            InvalidArgument: the name is taken.
            Unavailable: the server does not answer.
        """
        key, value = self._engines + entry.name, encode(entry)
        ttl_ms = max(1, round(config.current().metadata_ttl_s * 1000))
        for _ in range(ATTEMPTS):
            if self._store.create(key, value, ttl_ms):
                break
            with self._naming(entry.name):
                held = self._store.get(key)
                if held is None:
                    continue
                holder = self._decode(entry.name, held)
            if not is_gone(holder):
                raise self._taken(holder)
            if self._store.replace(key, held, value, ttl_ms):
                break
        else:
            raise Unavailable(f"metadata server {self.url}: {entry.name} comes and goes")
        return KeptPublication(self._store, key, value, ttl_ms)

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._store.close()

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except Malformed as error:
            raise Malformed(f"metadata server {self.url}: {name} is no entry: {error}") from None

    def _decode(self, name: str, value: bytes) -> Entry:
        entry = decode(name, value)
        described = None if entry.protocol == PROTOCOL else self._store.get(self._segments + name)
        if described is None:
            return entry
        segment = decode_segment(described)
        if segment.protocol == PROTOCOL:
            raise Malformed(f"a segment of {PROTOCOL}, which has none")
        return dataclasses.replace(entry, protocol=segment.protocol, segment=segment)

    def _taken(self, holder: Entry) -> InvalidArgument:
        who = f"pid {holder.pid} on {holder.host}" if holder.pid else "Mooncake's"
        return InvalidArgument(
            f"TransferEngine: name must be free at {self.url}, got {holder.name!r}, which the "
            f"engine at {holder.address} has ({who})"
        )


class KeptPublication:
    """An entry that exists until this is closed or its process ends: a thread refreshes it.

    If a server goes away, or loses its data, the entry is restored once it is back. Each change is
    logged once.
    """

    def __init__(self, store: Store, key: str, value: bytes, ttl_ms: int):
        self._store = store
        self._key = key
        self._value = value
        self._ttl_ms = ttl_ms
        self._pid = os.getpid()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=f"keep {key}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop refreshing, and remove the entry if it is still ours. Idempotent."""
        if self._closing.is_set() or os.getpid() != self._pid:
            return  # a forked child: the parent owns the entry, and the thread is not here
        self._closing.set()
        if threading.current_thread() is not self._thread:  # if it collects garbage
            self._thread.join()
        try:
            self._store.remove(self._key, self._value)
        except Unavailable as error:
            _log.warning("%s stays for up to %g s: %s", self._key, self._ttl_ms / 1000, error)

    def _keep(self) -> None:
        before = REFRESHED
        while not self._closing.wait(self._ttl_ms / 3000):
            now, why = self._refresh()
            if now != before:
                _log.warning("%s %s%s", self._key, now, why)
            before = now

    def _refresh(self) -> tuple[str, str]:
        try:
            if self._store.replace(self._key, self._value, self._value, self._ttl_ms):
                return REFRESHED, ""
            if self._store.create(self._key, self._value, self._ttl_ms):
                return REFRESHED, ""  # it had expired, or the server was restarted
            return TAKEN, ""
        except Unavailable as error:
            return AWAY, f": {error}"


class P2P(Metadata):
    """No server: finds the engine that listens at ``"host:port"``, whichever it is."""

    url = "p2p"

    def check_name(self, op: str, name: Any) -> str:
        """Return the name; raise ``InvalidArgument`` unless it is text: the rest shows later."""
        if not isinstance(name, str) or not name.isascii() or not name.isprintable():
            raise InvalidArgument(f'{op}: name must be "host:port", got {shown(name)}')
        return name

    def lookup(self, name: str) -> Entry | None:
        """Return an entry with that address. Whether an engine is there shows when it is opened."""
        return Entry(self.check_name("lookup", name), name)

    def entries(self) -> list[Entry]:
        """Raise ``Unavailable``: there is no list."""
        raise Unavailable("entries: p2p has no list of engines")

    def publish(self, entry: Entry, is_gone: Callable[[Entry], bool]) -> "P2P":
        """Do nothing: listening is enough."""
        return self
