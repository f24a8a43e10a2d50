"""An instance that lends its free blocks, and borrows others'."""

import logging
import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from mooncake_kernels.closeable import Closeable
from mooncake_kernels.transfer import TransferEngine

from ..rpc import Peers, Receiver, RpcClient
from .borrower import Borrowed, Borrower
from .geometry import Cache, Geometry
from .ledger import Heartbeat, Offer
from .lender import Lender
from .loans import Blocks, Loans
from .messages import Answer, decode, encode
from .options import LoanOptions

logger = logging.getLogger(__name__)

POLL_S = 0.05  # how long closing may go unnoticed
BUSY_POLL_S = 0.005  # how long a request that is kept may wait after its borrower's answer


@runtime_checkable
class Manager(Protocol):
    """The global manager as an instance sees it: a ``LoanLedger``, or the way to one."""

    def heartbeat(self, beat: Heartbeat) -> None:
        """Report; called from the member's thread."""

    def lenders(self, borrower: str, num_blocks: int) -> Sequence[Offer]:
        """Return candidates for a loan; called from the thread that borrows.

        An ``OSError`` counts as none.
        """

    def forget(self, instance: str) -> None:
        """Drop an instance that leaves."""


class Member(Closeable):
    """Lend and borrow for one engine, whose thread calls ``reserve`` and uses ``borrower``.

    A thread receives the notifications of the transfer engine, all of which are the member's:
    it serves borrowers, hands answers over, renews loans and reports to the manager. It never waits
    for another instance, so instances cannot wait for each other in a circle.

    Args:
        transfer: carries everything; stays the caller's, and must outlive the member.
        cache: in host memory.
        geometry: of the cache and its queries.
        blocks: of the cache, shared with the engine.
        manager: knows the other instances.
        options: see there.

    Attributes:
        name: of the instance, the transfer engine's.
        borrower: what borrows.
        lender: what lends.
        heartbeat_s: between reports.
    """

    def __init__(
        self,
        transfer: TransferEngine,
        cache: Cache,
        geometry: Geometry,
        blocks: Blocks,
        manager: Manager,
        options: LoanOptions,
    ):
        self.name = transfer.name
        self._blocks, self._manager, self.heartbeat_s = blocks, manager, options.heartbeat_s
        limit = options.max_lent_blocks
        self._calls = RpcClient(Peers(transfer), encode)
        self.borrower = Borrower(
            cache, geometry, self._calls, options.num_staged_blocks, options.answer_s
        )
        loans = Loans(blocks, blocks.num_blocks if limit is None else limit, options.lease_s)
        self.lender = Lender(
            cache,
            geometry,
            loans,
            self._calls,
            options.num_staged_blocks,
            options.lease_s,
            options.answer_s,
            on_change=self._report,
            is_borrowing=lambda: self.borrower.num_borrowed > 0,
        )
        self._report()
        self._due_s = 0.0  # when loans are renewed next
        self._receiver = Receiver(transfer, self._take, self._tend, self._poll_s, "mk-loans")

    def reserve(self, num_blocks: int) -> list[Borrowed]:
        """Borrow blocks from the manager's candidates, all or none: [] then.

        A manager that cannot be reached has none.
        """
        offers: Sequence[Offer] = []
        try:
            offers = self._manager.lenders(self.name, num_blocks)
        except OSError as error:
            logger.warning("%s cannot ask its manager for lenders: %s", self.name, error)
        return self.borrower.reserve(num_blocks, offers)

    def close(self) -> None:
        """End all loans, borrowed and lent. Idempotent."""
        if not self._receiver.closed:
            self._receiver.close()
            self.borrower.close()
            self.lender.close()
            self._manager.forget(self.name)  # last: closing the lender reports

    def _take(self, sender: str, data: bytes) -> None:
        message = decode(data)
        if isinstance(message, Answer):
            self._calls.take_response(sender, message)
        else:
            self.lender.handle(sender, message)

    def _tend(self) -> None:
        try:
            self.lender.go_on()
        finally:
            if time.monotonic() >= self._due_s:
                self._due_s = time.monotonic() + self.heartbeat_s
                self._keep()

    def _poll_s(self) -> float:
        return BUSY_POLL_S if self.lender.has_waiting else POLL_S

    def _keep(self) -> None:
        try:
            self.lender.expire()
            self.borrower.renew()
            self._report()
        except Exception:
            logger.exception("%s cannot renew its loans or report", self.name)

    def _report(self) -> None:
        lent = self.lender.loans.lent()
        borrowed = self.borrower.num_borrowed
        beat = Heartbeat(
            self.name, self._blocks.num_blocks, self.lender.loans.num_free, lent, borrowed
        )
        try:
            self._manager.heartbeat(beat)
        except OSError as error:
            logger.warning("%s cannot report to its manager: %s", self.name, error)
