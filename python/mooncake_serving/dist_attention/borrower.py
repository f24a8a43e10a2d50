"""What borrows: reserves blocks at lenders, moves KV there, asks them for attention."""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch

from mooncake_kernels import gather_blocks
from mooncake_kernels.errors import InvalidArgument, TransferError

from ..rpc import Call, Message, RpcClient
from .buffers import ResultBuffer
from .errors import LenderFailed
from .geometry import BLOCK_AXES, Cache, Geometry
from .ledger import Offer
from .messages import (
    MAX_NUMBERS,
    MAX_PARTS,
    Attend,
    Attended,
    Free,
    Part,
    Renew,
    Renewed,
    Reserve,
    Reserved,
    Store,
    Stored,
)
from .sessions import LenderSession

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Borrowed:
    """Blocks of a lender, once they are reserved; the first ``num_stored`` have contents."""

    lender: str
    number: int
    num_blocks: int
    num_stored: int = 0
    is_reserved: bool = False


class Borrower:
    """Borrow for one engine. One thread borrows; another may call ``renew`` and count.

    Args:
        cache: whose blocks move to lenders.
        geometry: of the cache and its queries.
        calls: sends the requests.
        num_staged: blocks that are moved at a time.
        answer_s: how long an answer may take.

    Attributes:
        last_refusal: who refused the last ``reserve``, and why; empty if none did.
    """

    def __init__(
        self, cache: Cache, geometry: Geometry, calls: RpcClient, num_staged: int, answer_s: float
    ):
        self._view, self._geometry = cache.view(), geometry
        self._calls, self._num_staged, self._answer_s = calls, num_staged, answer_s
        self.last_refusal = ""
        self._lenders: dict[str, LenderSession] = {}
        self._borrowed: dict[int, Borrowed] = {}
        self._retired: list[tuple[float, ResultBuffer]] = []  # until when their memory is kept
        self._lock = threading.Lock()

    @property
    def num_borrowed(self) -> int:
        """Count the blocks that are borrowed, or being asked for."""
        with self._lock:
            return sum(loan.num_blocks for loan in self._borrowed.values())

    def reserve(self, num_blocks: int, offers: Iterable[Offer]) -> list[Borrowed]:
        """Reserve blocks, of each lender in turn as many as it offers; all or nothing.

        Returns:
            The loans, in the order of their lenders; [] if the offers do not suffice.
        """
        self.last_refusal = ""
        loans: list[Borrowed] = []
        missing = num_blocks
        try:
            for offer in offers:
                if missing == 0:
                    break
                loan = self._reserve_at(offer.instance, min(missing, offer.num_blocks))
                if loan is not None:
                    loans.append(loan)
                    missing -= loan.num_blocks
        finally:
            if missing:  # also after an error, or Ctrl-C: they would be renewed for good
                self.free(loans)
        return [] if missing else loans

    def store(self, loan: Borrowed, block_ids: Sequence[int]) -> int:
        """Move blocks of the cache to the next blocks of a loan.

        Returns:
            How many were moved, from the first on: as many as are moved at a time. They may be
            reused now.

        Raises:
            LenderFailed: see there; everything borrowed from it is lost. So it is after any
                other error, because what the lender has by then is not known.
        """
        lender = self._known(loan.lender, is_writing=True)
        some = list(block_ids[: lender.num_staged])
        staged = lender.requests.staged[: len(some)]
        gather_blocks(self._view, some, out=staged, axes=BLOCK_AXES)
        request = Store(self._calls.next_number(), loan.number, loan.num_stored, len(some))
        data = lender.requests.send_staged(len(some), lender.requests_address)
        with self._losing(loan.lender, after=BaseException):
            call = self._calls.start(loan.lender, request, self._answer_s, data)
            self._calls.wait(call, Stored)
        lender.renew(call.started_s)
        loan.num_stored += len(some)
        return len(some)

    def start_attention(
        self, lender: str, layer_index: int, queries: torch.Tensor, parts: Sequence[Part]
    ) -> Call:
        """Send queries ``[num_rows, num_heads, head_dim]`` to a lender, without waiting.

        Raises:
            LenderFailed: as ``store``.
        """
        if len(parts) > MAX_PARTS:
            raise InvalidArgument(
                f"start_attention: parts must be at most {MAX_PARTS}, got {len(parts)}"
            )
        known = self._known(lender, is_writing=True)
        num_rows = queries.shape[0]
        known.requests.queries[:num_rows] = queries
        request = Attend(self._calls.next_number(), layer_index, tuple(parts))
        data = known.requests.send_queries(num_rows, known.requests_address)
        with self._losing(lender):
            return self._calls.start(lender, request, self._answer_s, data)

    def finish_attention(self, call: Call, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for the ``out`` and ``lse`` of a call, which are valid until the lender's next.

        Raises:
            LenderFailed: as ``store``.
        """
        known = self._known(call.name)
        with self._losing(call.name):
            self._calls.wait(call, Attended)
        known.renew(call.started_s)
        return known.results.out[:num_rows], known.results.lse[:num_rows]

    def end_calls(self, calls: Iterable[Call]) -> None:
        """Forget calls whose answers are not wanted any more."""
        for call in calls:
            self._calls.end(call)

    def free(self, loans: Iterable[Borrowed]) -> None:
        """End loans, without waiting: of a lender that does not learn of it, the lease ends.

        One that is not connected to is not notified: it may be stopped, and connecting would wait.
        """
        for loan in loans:
            with self._lock:
                if self._borrowed.pop(loan.number, None) is None:
                    continue  # lost before
            with suppress(TransferError):
                message = Free(loan.number)
                self._calls.post(loan.lender, message, self._answer_s, may_open=False)
        self._tidy()

    def renew(self) -> None:
        """Tell all lenders which loans are still used; does not wait.

        One whose last answer is still to come is left out, and so is one that is not connected to.
        """
        numbers: dict[str, list[int]] = {}
        with self._lock:
            for loan in self._borrowed.values():
                if loan.is_reserved:
                    numbers.setdefault(loan.lender, []).append(loan.number)
        for name, of_one in numbers.items():
            lender = self._lenders.get(name)
            if lender is None or not self._calls.peers.is_open(name):
                continue
            try:
                if not any(self._calls.is_under_way(call) for call in lender.renewals):
                    self.end_calls(lender.renewals)
                    lender.renewals = self._start_renewals(name, lender, of_one)
            except TransferError as error:
                self.end_calls(lender.renewals)
                lender.renewals = []
                self._fail_calls(name, error)

    def close(self) -> None:
        """End all loans."""
        self.free(list(self._borrowed.values()))

    def _start_renewals(self, name: str, lender: LenderSession, loans: Sequence[int]) -> list[Call]:
        calls = []
        for start in range(0, len(loans), MAX_NUMBERS):
            some = tuple(loans[start : start + MAX_NUMBERS])
            request = Renew(self._calls.next_number(), some)
            call = self._calls.start(name, request, self._answer_s, may_open=False)
            call.future.add_done_callback(partial(self._take_renewal, lender, call, some))
            calls.append(call)
        return calls

    def _take_renewal(
        self, lender: LenderSession, call: Call, asked: Sequence[int], future: Future[Message]
    ) -> None:
        """Take the answer to a renewal: a loan that was not freed here must not have ended."""
        if future.exception() is not None or not isinstance(answer := future.result(), Renewed):
            return
        with self._lock:
            ended = [n for n in set(asked).difference(answer.loans) if n in self._borrowed]
        if ended:
            lender.end_lease()
        else:
            lender.renew(call.started_s)

    def _reserve_at(self, name: str, num_blocks: int) -> Borrowed | None:
        """Reserve at one lender; None if it refuses, or cannot be reached."""
        known = self._lenders.get(name)
        if known is not None and not known.is_leased:
            self._lose(name)
            known = None
        if known is None:
            known = LenderSession(self._calls.peers.engine, self._geometry, self._num_staged)
            self._lenders[name] = known
        loan = Borrowed(name, self._calls.next_number(), num_blocks)
        with self._lock:
            self._borrowed[loan.number] = loan
        request = Reserve(loan.number, num_blocks, known.results.address, self._geometry.numbers())
        try:
            call = self._calls.start(name, request, self._answer_s)
            reserved = self._calls.wait(call, Reserved)
        except TransferError as error:
            self.last_refusal = str(LenderFailed(name, error.cause))
            logger.info("no loan of %d blocks: %s", num_blocks, self.last_refusal)
            self.free([loan])
            return None
        except BaseException:
            self.free([loan])
            raise
        known.accept(reserved, call.started_s)
        loan.is_reserved = True
        return loan

    def _known(self, name: str, *, is_writing: bool = False) -> LenderSession:
        """Return a lender.

        Raises:
            LenderFailed: it was lost, and its loans with it; or the lease has ended, after which
                its buffer may be another's.
        """
        known = self._lenders.get(name)
        if known is None:
            raise LenderFailed(name, "it has failed before")
        if is_writing and not known.is_leased:
            self._lose(name)
            raise LenderFailed(name, f"the lease of {known.lease_s:g} s was not renewed in time")
        return known

    @contextmanager
    def _losing(self, name: str, after: type[BaseException] = TransferError) -> Iterator[None]:
        """Give up a lender after such an error."""
        try:
            yield
        except after as error:
            self._lose(name)
            if isinstance(error, TransferError):
                raise LenderFailed(name, error.cause) from error
            raise

    def _fail_calls(self, name: str, error: TransferError) -> None:
        self._calls.fail(lambda call: call.name == name, error.cause, error.kind)

    def _lose(self, name: str) -> None:
        """Give up a lender: nothing that it still sends can land here."""
        self.free([loan for loan in list(self._borrowed.values()) if loan.lender == name])

    def _tidy(self) -> None:
        """Close the buffers of lenders without loans.

        Such a lender may still send results, of a call that no one waits for any more: the memory
        of its buffer is kept for a lease, so that no other lender's buffer is at that address.
        After that it refuses to.
        """
        with self._lock:
            used = {loan.lender for loan in self._borrowed.values()}
        now = time.monotonic()
        self._retired = [(until, results) for until, results in self._retired if until > now]
        for name in [name for name in self._lenders if name not in used]:
            lender = self._lenders.pop(name)
            lender.close()
            self.end_calls(lender.renewals)
            self._retired.append((now + lender.lease_s, lender.results))
