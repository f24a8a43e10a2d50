"""The buffers that a creditor has for its debtors."""

import time
from collections.abc import Collection

from mooncake_kernels.closeable import Closeable
from mooncake_kernels.transfer import TransferEngine

from .buffers import RequestBuffer, ResultBuffer
from .geometry import Geometry


class Desk(Closeable):
    """Buffers for one debtor.

    Attributes:
        requests: what it sends.
        results: what is sent back.
        results_address: of the debtor's buffer.
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


class Desks:
    """A desk for each debtor with loans.

    What a debtor has sent may come later than the end of its loans, and one that does not know of
    the end may still write: the memory of its desk is kept for a lease, so that nobody else's desk
    is at that address.

    Args:
        transfer: registers the buffers.
        num_staged: blocks in each.
        keep_s: how long memory is kept; a lease, after which a debtor that lives knows of the end.
    """

    def __init__(self, transfer: TransferEngine, num_staged: int, keep_s: float):
        self._transfer, self._num_staged, self._keep_s = transfer, num_staged, keep_s
        self._desks: dict[str, Desk] = {}
        self._retired: list[tuple[float, Desk]] = []

    def get(self, debtor: str) -> Desk | None:
        """Return a debtor's desk."""
        return self._desks.get(debtor)

    def open(self, debtor: str, geometry: Geometry, results_address: int) -> Desk:
        """Make a desk."""
        desk = Desk(self._transfer, geometry, self._num_staged, results_address)
        self._desks[debtor] = desk
        return desk

    def close_all_but(self, debtors: Collection[str]) -> None:
        """Close the desks of others."""
        for name in [name for name in self._desks if name not in debtors]:
            desk = self._desks.pop(name)
            desk.close()
            self._retired.append((time.monotonic(), desk))

    def free_retired(self) -> None:
        """Free the memory that was kept for long enough."""
        oldest = time.monotonic() - self._keep_s
        self._retired = [(closed, desk) for closed, desk in self._retired if closed > oldest]
