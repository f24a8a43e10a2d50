"""The base of all RDMA handles: closed once, by the first caller."""

from typing import Any

from .. import _host
from ..closeable import Closeable
from ..errors import Unavailable


def require_verbs() -> None:
    """Raise ``Unavailable``, with the loader's message, if there is no libibverbs."""
    reason = _host.missing_verbs()
    if reason:
        raise Unavailable(f"rdma: {reason}")


SIGNAL_CHECK_S = 0.1  # the longest that a wait delays Ctrl-C


class Handle(Closeable):
    """A NIC's resource; a context manager that closes it."""

    def __init__(self, handle: Any):
        self._handle = handle

    def __del__(self) -> None:
        """Close it here: the compiled code's destructors would hold the GIL in the verbs."""
        if hasattr(self, "_handle"):
            self._handle.close()

    @property
    def closed(self) -> bool:
        """Whether it is closed, by its own ``close()`` or that of what it depends on."""
        return self._handle.closed

    def close(self) -> None:
        """Release it, after all that depends on it. Idempotent; no effect in a forked child."""
        self._handle.close()
