"""Keep an engine in a server: a thread that refreshes its entry before it expires."""

import logging
import os
import threading

from ..errors import Unavailable
from .base import Store

REFRESHED = "is published again"
TAKEN = "is another engine's by now"
AWAY = "cannot be refreshed"

_log = logging.getLogger(__name__)


class KeptPublication:
    """An entry that exists until this is closed or its process ends.

    If a server goes away, or loses its data, the entry is restored once it is back. Each change is
    logged once.
    """

    def __init__(self, store: Store, key: str, value: bytes, ttl_s: float):
        self._store = store
        self._key = key
        self._value = value
        self._ttl_s = ttl_s
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
            _log.warning("%s stays for up to %g s: %s", self._key, self._ttl_s, error)

    def _keep(self) -> None:
        before = REFRESHED
        while not self._closing.wait(self._ttl_s / 3):
            now, why = self._refresh()
            if now != before:
                _log.warning("%s %s%s", self._key, now, why)
            before = now

    def _refresh(self) -> tuple[str, str]:
        try:
            if self._store.replace(self._key, self._value, self._value, self._ttl_s):
                return REFRESHED, ""
            if self._store.create(self._key, self._value, self._ttl_s):
                return REFRESHED, ""  # it had expired, or the server was restarted
            return TAKEN, ""
        except Unavailable as error:
            return AWAY, f": {error}"
