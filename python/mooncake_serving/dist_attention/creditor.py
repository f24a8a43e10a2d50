"""One creditor as its debtor sees it: the buffers, and the lease."""

import time

from mooncake_kernels.closeable import Closeable
from mooncake_kernels.transfer import TransferEngine

from ..rpc import Call
from .buffers import RequestBuffer, ResultBuffer
from .geometry import Geometry
from .messages import Reserved


class Creditor(Closeable):
    """Buffers for one creditor, and until when it surely keeps its own for this debtor.

    A debtor whose lease may have ended must not write: the creditor's buffer may be another's. Only
    an answer renews the lease: a request that was delivered may find that the loans have ended.

    Attributes:
        requests: what is sent.
        results: what comes back.
        requests_address: of the creditor's buffer, once something was reserved.
        num_staged: blocks that are moved at a time.
        lease_s: how long a loan lasts that is not renewed.
    """

    def __init__(self, transfer: TransferEngine, geometry: Geometry, num_staged: int):
        self.requests = RequestBuffer(transfer, geometry, num_staged, is_in=False)
        try:
            self.results = ResultBuffer(transfer, geometry, is_in=True)
        except BaseException:
            self.requests.close()
            raise
        self.requests_address, self.num_staged, self.lease_s = 0, num_staged, 0.0
        self.renewals: list[Call] = []  # the last ones
        self._has_ended = False
        self._renewed_s = 0.0  # when the last request was sent that has surely renewed a loan

    @property
    def is_leased(self) -> bool:
        """Tell whether the creditor surely still has a loan, and so the buffer."""
        return not self._has_ended and time.monotonic() <= self._renewed_s + self.lease_s

    def accept(self, reserved: Reserved, sent_s: float) -> None:
        """Begin a loan that was asked for at ``sent_s``."""
        self.requests_address = reserved.requests_address
        self.num_staged = min(self.requests.staged.shape[0], max(1, reserved.num_staged))
        self.lease_s = reserved.lease_ms / 1000
        self.renew(sent_s)

    def renew(self, sent_s: float) -> None:
        """A request that was sent at ``sent_s`` was answered: it has renewed what it names."""
        self._renewed_s = max(self._renewed_s, sent_s)

    def end_lease(self) -> None:
        """The creditor has ended a loan: nothing is written to it any more."""
        self._has_ended = True

    def close(self) -> None:
        """Deregister the buffers: nothing that the creditor still sends lands."""
        self.requests.close()
        self.results.close()
