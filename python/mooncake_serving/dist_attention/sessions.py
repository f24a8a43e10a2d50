"""The buffers through which a borrower and a lender exchange, and until when they may be used."""

import time
from collections.abc import Collection

from mooncake_kernels.closeable import Closeable
from mooncake_kernels.transfer import TransferEngine

from ..rpc import Call
from .buffers import RequestBuffer, ResultBuffer
from .geometry import Geometry
from .messages import Reserved


class LenderSession(Closeable):
    """Buffers for one lender, and until when it surely keeps its own for this borrower.

    A borrower whose lease may have ended must not write: the lender's buffer may be another's. Only
    an answer renews the lease: a request that was delivered may find that the loans have ended.

    Attributes:
        requests: what is sent.
        results: what comes back.
        requests_address: of the lender's buffer, once something was reserved.
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
        """Tell whether the lender surely still has a loan, and so the buffer."""
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
        """The lender has ended a loan: nothing is written to it any more."""
        self._has_ended = True

    def close(self) -> None:
        """Deregister the buffers: nothing that the lender still sends lands."""
        self.requests.close()
        self.results.close()


class BorrowerSession(Closeable):
    """Buffers for one borrower.

    Attributes:
        requests: what it sends.
        results: what is sent back.
        results_address: of the borrower's buffer.
    """

    def __init__(
        self, transfer: TransferEngine, geometry: Geometry, num_staged: int, results_address: int
    ):
        self.results_address = results_address
        self.requests = RequestBuffer(transfer, geometry, num_staged, is_in=True)
        try:
            self.results = ResultBuffer(transfer, geometry, is_in=False)
        except BaseException:
            self.requests.close()
            raise

    def close(self) -> None:
        """Deregister the buffers."""
        self.requests.close()
        self.results.close()


class BorrowerSessions:
    """A session for each borrower with loans.

    What a borrower has sent may come later than the end of its loans, and one that does not know of
    the end may still write: the memory of its session is kept for a lease, so that no other session
    is at that address.

    Args:
        transfer: registers the buffers.
        num_staged: blocks in each.
        keep_s: how long memory is kept; a lease, after which a borrower that lives knows of it.
    """

    def __init__(self, transfer: TransferEngine, num_staged: int, keep_s: float):
        self._transfer, self._num_staged, self._keep_s = transfer, num_staged, keep_s
        self._sessions: dict[str, BorrowerSession] = {}
        self._retired: list[tuple[float, BorrowerSession]] = []

    def get(self, borrower: str) -> BorrowerSession | None:
        """Return a borrower's session."""
        return self._sessions.get(borrower)

    def open(self, borrower: str, geometry: Geometry, results_address: int) -> BorrowerSession:
        """Make a session."""
        session = BorrowerSession(self._transfer, geometry, self._num_staged, results_address)
        self._sessions[borrower] = session
        return session

    def close_all_but(self, borrowers: Collection[str]) -> None:
        """Close the sessions of others."""
        for name in [name for name in self._sessions if name not in borrowers]:
            session = self._sessions.pop(name)
            session.close()
            self._retired.append((time.monotonic(), session))

    def free_retired(self) -> None:
        """Free the memory that was kept for long enough."""
        oldest = time.monotonic() - self._keep_s
        self._retired = [(closed, session) for closed, session in self._retired if closed > oldest]
