"""What lends: it lends blocks of its cache, and attends to them for their borrowers."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from mooncake_kernels import scatter_blocks
from mooncake_kernels.errors import InvalidArgument, TransferError
from mooncake_kernels.transfer import Ticket

from ..rpc import MAX_REASON, Descriptors, Refused, RpcClient
from .errors import Refusal
from .geometry import BLOCK_AXES, Cache, Geometry
from .loans import Loans
from .messages import (
    Answer,
    Attend,
    Attended,
    Free,
    Part,
    Renew,
    Renewed,
    Request,
    Reserve,
    Reserved,
    Store,
    Stored,
)
from .opening import Opening
from .partial import PartialAttention
from .sessions import BorrowerSession, BorrowerSessions

logger = logging.getLogger(__name__)

GRACE_S = 0.01  # for an answer to be seen as delivered
MAX_WAITING = 1024  # requests of one borrower


class Lender:
    """Answer borrowers' requests, one after the other, on one thread, which waits for no borrower.

    At most one thing is under way to a borrower, a connection or an answer; its next requests are
    kept meanwhile. So one that is stopped does not hold up the others.

    The cache is not registered: what a borrower sends is in a buffer of its own until the request
    is checked, and then only blocks of its own loans are read or written.

    Args:
        cache: whose blocks are lent.
        geometry: what borrowers must have, except for fewer rows.
        loans: what is lent.
        calls: sends the answers.
        num_staged: blocks that a borrower can move at a time.
        lease_s: of the loans.
        answer_s: how long connecting to a borrower may take, and delivering an answer.
        on_change: called when more or less is lent, before a borrower learns of it.
        is_borrowing: tells whether the instance borrows now; it does not lend then.
    """

    def __init__(
        self,
        cache: Cache,
        geometry: Geometry,
        loans: Loans,
        calls: RpcClient,
        num_staged: int,
        lease_s: float,
        answer_s: float,
        on_change: Callable[[], None],
        is_borrowing: Callable[[], bool],
    ):
        self.loans = loans
        self._lease_s, self._on_change, self._is_borrowing = lease_s, on_change, is_borrowing
        self._geometry, self._num_staged, self._answer_s = geometry, num_staged, answer_s
        self._calls, self._peers = calls, calls.peers
        self._view = cache.view()
        self._attention = PartialAttention(cache)
        self._sessions = BorrowerSessions(calls.peers.engine, num_staged, lease_s)
        self._under_way: dict[str, Ticket | Opening] = {}  # to a borrower
        self._waiting: dict[str, deque[Request]] = {}  # of a borrower, never empty

    @property
    def has_waiting(self) -> bool:
        """Tell whether requests wait until their borrower can be answered."""
        return bool(self._waiting)

    def handle(self, borrower: str, request: Request) -> None:
        """Carry out a request and send its answer, without waiting for its delivery.

        While the last answer to the borrower is under way, the request is kept for ``go_on``: the
        buffer with the results is in use.

        Raises:
            InvalidArgument: too many requests of that borrower are kept.
        """
        requests = self._waiting.setdefault(borrower, deque())
        if len(requests) == MAX_WAITING:
            raise InvalidArgument(f"handle: requests must be at most {MAX_WAITING} at a time")
        requests.append(request)
        # One that asks again has its answer: it takes a moment until this side sees that, too.
        self._go_on(borrower, GRACE_S if len(requests) == 1 else 0.0)

    def go_on(self) -> None:
        """Carry out what was kept, of borrowers that can be answered now; drop those that are gone.

        Never waits.
        """
        for borrower in {*self._under_way, *self._waiting}:
            self._is_settled(borrower, 0.0)
            self._go_on(borrower, 0.0)

    def expire(self) -> None:
        """End loans whose borrowers are silent."""
        expired = self.loans.free_expired()
        for borrower in expired:
            logger.warning("%s has not renewed a loan, which is freed", borrower)
        if expired:
            self._sessions.close_all_but(self.loans.lent())
            self._on_change()
        self._sessions.free_retired()

    def drop(self, borrower: str) -> None:
        """End all loans of a borrower."""
        self._under_way.pop(borrower, None)
        self._peers.forget(borrower)  # first, so that nothing is being written from its session
        self.loans.free_all(borrower)
        self._sessions.close_all_but(self.loans.lent())
        self._on_change()

    def close(self) -> None:
        """End all loans."""
        for borrower in self.loans.lent():
            self.drop(borrower)

    def _go_on(self, borrower: str, wait_s: float) -> None:
        """Carry out a borrower's requests in order, until something is under way to it."""
        while borrower in self._waiting and self._is_settled(borrower, wait_s):
            requests = self._waiting.get(borrower)
            if requests is None:
                return  # it cannot be connected to
            request = requests[0]
            if isinstance(request, Reserve):
                self._drop_earlier(borrower, request)
            if not self._peers.is_open(borrower) and not isinstance(request, Free):
                self._under_way[borrower] = Opening(self._peers, borrower, self._answer_s)
                continue
            requests.popleft()
            if not requests:
                del self._waiting[borrower]
            self._carry_out(borrower, request)

    def _is_settled(self, borrower: str, wait_s: float) -> bool:
        """Tell whether nothing is under way to a borrower; one that is gone is dropped."""
        under_way = self._under_way.get(borrower)
        if under_way is None:
            return True
        try:
            under_way.wait(wait_s)
        except TransferError as error:
            logger.warning("%s is gone, and its loans are freed: %s", borrower, error)
            if isinstance(under_way, Opening):
                self._waiting.pop(borrower, None)
            self.drop(borrower)
        except TimeoutError:
            return False
        self._under_way.pop(borrower, None)
        return True

    def _carry_out(self, borrower: str, request: Request) -> None:
        if isinstance(request, Free):
            if self.loans.free(borrower, request.number):
                self._sessions.close_all_but(self.loans.lent())
                self._on_change()
            return
        try:
            answer, data = self._answer(borrower, request)
        except (Refusal, RuntimeError, ValueError, OSError, MemoryError) as error:
            answer, data = Refused(request.number, str(error)[:MAX_REASON]), []
        try:
            self._under_way[borrower] = self._calls.post(
                borrower, answer, self._answer_s, data, may_open=False
            )
        except TransferError as error:
            logger.warning("%s is gone, and its loans are freed: %s", borrower, error)
            self.drop(borrower)

    def _answer(
        self, borrower: str, request: Reserve | Store | Attend | Renew
    ) -> tuple[Answer, Descriptors]:
        if isinstance(request, Reserve):
            if self._is_borrowing():
                raise Refusal("the instance borrows itself")
            return self._reserve(borrower, request), []
        if isinstance(request, Store):
            return self._store(borrower, request), []
        if isinstance(request, Renew):
            return Renewed(request.number, tuple(self.loans.renew(borrower, request.loans))), []
        return self._attend(borrower, request)

    def _drop_earlier(self, borrower: str, request: Reserve) -> None:
        """Drop another process of that name, or one that has given this instance up."""
        known = self._sessions.get(borrower)
        if known is not None and known.results_address != request.results_address:
            self.drop(borrower)

    def _reserve(self, borrower: str, request: Reserve) -> Reserved:
        *theirs, max_rows = request.geometry
        *ours, limit = self._geometry.numbers()
        if theirs != ours or not 1 <= max_rows <= limit:
            raise Refusal(f"geometry must be {ours} with 1 to {limit} rows, got {request.geometry}")
        known = self._sessions.get(borrower)
        self.loans.reserve(borrower, request.number, request.num_blocks)
        if known is None:
            geometry = replace(self._geometry, max_rows=max_rows)
            try:
                known = self._sessions.open(borrower, geometry, request.results_address)
            except BaseException:
                self.loans.free(borrower, request.number)
                raise
        self._on_change()
        lease_ms = int(self._lease_s * 1000)
        return Reserved(request.number, known.requests.address, self._num_staged, lease_ms)

    def _store(self, borrower: str, request: Store) -> Stored:
        loan = self.loans.use(borrower, request.loan)
        first, end = request.first_block, request.first_block + request.num_blocks
        is_next = first == loan.num_stored and first < end <= len(loan.block_ids)
        if not is_next or request.num_blocks > self._num_staged:
            raise Refusal(
                f"blocks must be the next of {len(loan.block_ids)} after {loan.num_stored}, at "
                f"most {self._num_staged}, got {first} to {end}"
            )
        staged = self._session(borrower).requests.staged[: request.num_blocks]
        scatter_blocks(staged, loan.block_ids[first:end], self._view, axes=BLOCK_AXES)
        loan.num_stored = end
        return Stored(request.number)

    def _attend(self, borrower: str, request: Attend) -> tuple[Attended, Descriptors]:
        parts = self._checked_parts(borrower, request.parts)
        if not 0 <= request.layer_index < self._geometry.num_layers:
            raise Refusal(f"layer_index must be a layer, got {request.layer_index}")
        session = self._session(borrower)
        num_rows = sum(q_len for q_len, _ in parts)
        if num_rows > session.requests.queries.shape[0]:
            raise Refusal(f"parts must have at most the rows of max_rows, got {num_rows}")
        queries = session.requests.queries[:num_rows]
        out, lse = self._attention.attend(request.layer_index, queries, parts)
        session.results.out[:num_rows] = out
        session.results.lse[:num_rows] = lse
        return Attended(request.number), session.results.send(num_rows, session.results_address)

    def _checked_parts(self, borrower: str, parts: Sequence[Part]) -> list[tuple[int, list[int]]]:
        """Return how many queries each part has, and its blocks, all of that borrower."""
        checked = []
        for part in parts:
            loan = self.loans.use(borrower, part.loan)
            if part.q_len < 1 or not 1 <= part.num_blocks == loan.num_stored:
                raise Refusal(
                    f"parts must have queries and the {loan.num_stored} blocks stored of loan "
                    f"{part.loan}, got {part.q_len} and {part.num_blocks}"
                )
            checked.append((part.q_len, loan.stored_ids))
        if not checked:
            raise Refusal("parts must not be empty")
        return checked

    def _session(self, borrower: str) -> BorrowerSession:
        session = self._sessions.get(borrower)
        assert session is not None, "a borrower with a loan has one"
        return session
