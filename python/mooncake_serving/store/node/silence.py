"""Nodes that have not answered in time, which are not asked again for a while."""

import threading
import time

from mooncake_kernels.errors import TransferError, Unavailable


class Silence:
    """Names of nodes that were silent lately. Thread-safe.

    A node that hangs remains a member until its time to live is over. Until then, every request to
    it would take as long as an answer may: so after one, it is asked again only when a while has
    passed, or once something has come from it. One that refuses a connection costs no time, and may
    be back at once: it is not silent.

    Args:
        lasts_s: for how long a node is not asked.
    """

    def __init__(self, lasts_s: float):
        self._lasts_s = lasts_s
        self._until: dict[str, float] = {}
        self._lock = threading.Lock()

    def note(self, name: str, error: TransferError | Unavailable) -> None:
        """Note that a request to a node failed: if it was not answered in time, it is silent."""
        if getattr(error, "timed_out", False):
            with self._lock:
                self._until[name] = time.monotonic() + self._lasts_s

    def heard(self, name: str) -> None:
        """Note that something came from a node."""
        if self._until:  # seldom, and messages are many
            with self._lock:
                self._until.pop(name, None)

    def __contains__(self, name: str) -> bool:
        if not self._until:
            return False
        with self._lock:
            until = self._until.get(name)
            if until is not None and time.monotonic() >= until:
                del self._until[name]
                until = None
            return until is not None
