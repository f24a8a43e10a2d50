"""An instance's place in a pool: it lends its free blocks, and borrows others'."""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from mooncake_kernels.closing import Closing
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.transfer import TransferEngine

from .borrower import Borrowed, Borrower
from .calls import Calls
from .geometry import Cache, Geometry
from .ledger import Heartbeat, Offer
from .lender import Lender
from .loans import Blocks, Loans
from .messages import Attended, Refused, Renewed, Reserved, Stored
from .options import PoolOptions
from .peers import Peers
from .wire import decode

logger = logging.getLogger(__name__)

POLL_S = 0.05  # how long closing may go unnoticed
BUSY_POLL_S = 0.005  # how long a request that is kept may wait after its debtor's answer


@runtime_checkable
class Manager(Protocol):
    """The global manager as an instance sees it: a ``DebtLedger``, or the way to one."""

    def heartbeat(self, beat: Heartbeat) -> None:
        """Report; called from the member's thread."""

    def creditors(self, debtor: str, num_blocks: int) -> Sequence[Offer]:
        """Return candidates for a loan; called from the thread that borrows.

        An ``OSError`` counts as none.
        """

    def forget(self, instance: str) -> None:
        """Drop an instance that leaves."""


class Member(Closing):
    """Lend and borrow for one engine, whose thread calls ``reserve`` and uses ``borrower``.

    A thread receives the notifications of the transfer engine, all of which are the member's:
    it serves debtors, hands answers over, renews loans and reports to the manager. It never waits
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
        borrower: the debtor's half.
        lender: the creditor's half.
        heartbeat_s: between reports.
    """

    def __init__(
        self,
        transfer: TransferEngine,
        cache: Cache,
        geometry: Geometry,
        blocks: Blocks,
        manager: Manager,
        options: PoolOptions,
    ):
        self.name, self._transfer = transfer.name, transfer
        self._blocks, self._manager, self.heartbeat_s = blocks, manager, options.heartbeat_s
        limit = options.max_lent_blocks
        peers = Peers(transfer, options.answer_s)
        self._calls = Calls(peers, options.answer_s)
        self.borrower = Borrower(cache, geometry, self._calls, peers, options.num_staged_blocks)
        loans = Loans(blocks, blocks.num_blocks if limit is None else limit, options.lease_s)
        self.lender = Lender(
            cache,
            geometry,
            loans,
            peers,
            options.num_staged_blocks,
            options.lease_s,
            on_change=self._report,
            is_borrowing=lambda: self.borrower.num_borrowed > 0,
        )
        self._is_over = threading.Event()
        self._report()
        self._thread = threading.Thread(target=self._run, name="mk-pool", daemon=True)
        self._thread.start()

    def reserve(self, num_blocks: int) -> list[Borrowed]:
        """Borrow blocks from the manager's candidates, all or none: [] then.

        A manager that cannot be reached has none.
        """
        offers: Sequence[Offer] = []
        try:
            offers = self._manager.creditors(self.name, num_blocks)
        except OSError as error:
            logger.warning("%s cannot ask its manager for creditors: %s", self.name, error)
        return self.borrower.reserve(num_blocks, offers)

    def close(self) -> None:
        """End all loans, borrowed and lent. Idempotent."""
        if not self._is_over.is_set():
            self._is_over.set()
            self._thread.join()
            self.borrower.close()
            self.lender.close()
            self._manager.forget(self.name)  # last: closing the lender reports

    def _run(self) -> None:
        due = 0.0
        while not self._is_over.is_set():
            try:
                poll_s = BUSY_POLL_S if self.lender.has_waiting else POLL_S
                received = self._transfer.receive_notifications(poll_s)
            except InvalidArgument as error:  # the engine was closed
                logger.warning("%s has left the pool: %s", self.name, error)
                return
            for sender, data in received:
                try:
                    self._take(sender, data)
                except InvalidArgument as error:
                    logger.warning("from %s: %s", sender, error)
                except Exception:  # whatever is wrong with one message, the others are received
                    logger.exception("a message from %s is dropped", sender)
            try:
                self.lender.go_on()
            except Exception:
                logger.exception("%s cannot go on with what it was asked for", self.name)
            if time.monotonic() >= due:
                due = time.monotonic() + self.heartbeat_s
                self._keep()

    def _take(self, sender: str, data: bytes) -> None:
        message = decode(data)
        if isinstance(message, Reserved | Stored | Attended | Renewed | Refused):
            self._calls.take_answer(sender, message)
            return
        self.lender.handle(sender, message)

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
