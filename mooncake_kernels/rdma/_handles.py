"""What every handle of RDMA shares: it is closed once, by whoever comes first."""

from typing import Any

from .. import _host
from .._closing import Closing
from ..errors import Unavailable


def require_verbs() -> None:
    """Raise ``Unavailable``, in the loader's words, if there is no libibverbs."""
    reason = _host.missing_verbs()
    if reason:
        raise Unavailable(f"rdma: {reason}")


SIGNAL_CHECK_S = 0.1  # how long Ctrl-C may go unnoticed in a wait


class Handle(Closing):
    """Something of a NIC, and a context manager that closes it."""

    def __init__(self, handle: Any):
        self._handle = handle

    @property
    def closed(self) -> bool:
        """Whether it is closed, by its own ``close()`` or that of what it lives on."""
        return self._handle.closed

    def close(self) -> None:
        """Give it back, after all that lives on it. Again, and in a forked child: no effect."""
        self._handle.close()
