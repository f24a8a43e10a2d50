"""Nodes that have not answered in time, which are not asked again for a while."""

import threading
import time

from mooncake_kernels.errors import TransferError, Unavailable

from ..directory import Member


class PeerBackoff:
    """Nodes that were silent lately. Thread-safe.

    A node that hangs remains a member until its time to live is over. Until then, every request to
    it would take as long as an answer may: so after one, it is asked again only when a while has
    passed, or once something has come from it. One that refuses a connection costs no time, and may
    be back at once: it is not silent. Nor is a later node of the same name.

    Args:
        lasts_s: for how long a node is not asked.
    """

    def __init__(self, lasts_s: float):
        self._lasts_s = lasts_s
        self._until: dict[str, tuple[int, float]] = {}  # by name: its life, and until when
        self._lock = threading.Lock()

    def failed(self, member: Member, error: TransferError | Unavailable) -> None:
        """Note that a request to a node failed: if it was not answered in time, it is silent."""
        if getattr(error, "timed_out", False):
            with self._lock:
                self._until[member.name] = member.life, time.monotonic() + self._lasts_s

    def heard(self, name: str) -> None:
        """Note that something came from a node."""
        if self._until:  # seldom, and messages are many
            with self._lock:
                self._until.pop(name, None)

    def __contains__(self, member: Member) -> bool:
        if not self._until:
            return False
        with self._lock:
            life, until = self._until.get(member.name, (0, 0.0))
            if until and time.monotonic() >= until:
                del self._until[member.name]
                until = 0.0
            return until > 0 and life == member.life
