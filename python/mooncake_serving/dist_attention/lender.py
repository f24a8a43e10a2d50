"""The creditor's half: lends blocks of its cache, and attends to them for their debtors."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from mooncake_kernels import scatter_blocks
from mooncake_kernels.errors import InvalidArgument, TransferError
from mooncake_kernels.transfer import Ticket

from ..rpc import MAX_REASON, Descriptors, Refused, RpcClient
from .desks import Desk, Desks
from .errors import Refusal
from .geometry import Cache, Geometry
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

logger = logging.getLogger(__name__)

GRACE_S = 0.01  # for an answer to be seen as delivered
MAX_WAITING = 1024  # requests of one debtor


class Lender:
    """Answer debtors' requests, one after the other, on one thread, which waits for no debtor.

    At most one thing is under way to a debtor, a connection or an answer; its next requests are
    kept meanwhile. So one that is stopped does not hold up the others.

    The cache is not registered: what a debtor sends is in a buffer of its own until the request is
    checked, and then only blocks of its own loans are read or written.

    Args:
        cache: whose blocks are lent.
        geometry: what debtors must have, except for fewer rows.
        loans: the book of what is lent.
        calls: sends the answers.
        num_staged: blocks that a debtor can move at a time.
        lease_s: of the loans.
        answer_s: how long connecting to a debtor may take, and delivering an answer.
        on_change: called when more or less is lent, before a debtor learns of it.
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
        self._desks = Desks(calls.peers.engine, num_staged, lease_s)
        self._under_way: dict[str, Ticket | Opening] = {}  # to a debtor
        self._waiting: dict[str, deque[Request]] = {}  # of a debtor, never empty

    @property
    def has_waiting(self) -> bool:
        """Tell whether requests wait until their debtor can be answered."""
        return bool(self._waiting)

    def handle(self, debtor: str, request: Request) -> None:
        """Carry out a request and send its answer, without waiting for its delivery.

        While the last answer to the debtor is under way, the request is kept for ``go_on``: the
        buffer with the results is in use.

        Raises:
            InvalidArgument: too many requests of that debtor are kept.
        """
        requests = self._waiting.setdefault(debtor, deque())
        if len(requests) == MAX_WAITING:
            raise InvalidArgument(f"handle: requests must be at most {MAX_WAITING} at a time")
        requests.append(request)
        # One that asks again has its answer: it takes a moment until this side sees that, too.
        self._go_on(debtor, GRACE_S if len(requests) == 1 else 0.0)

    def go_on(self) -> None:
        """Carry out what was kept, of debtors that can be answered now; drop those that are gone.

        Never waits.
        """
        for debtor in {*self._under_way, *self._waiting}:
            self._is_settled(debtor, 0.0)
            self._go_on(debtor, 0.0)

    def expire(self) -> None:
        """End loans whose debtors are silent."""
        expired = self.loans.free_expired()
        for debtor in expired:
            logger.warning("%s has not renewed a loan, which is freed", debtor)
        if expired:
            self._desks.close_all_but(self.loans.lent())
            self._on_change()
        self._desks.free_retired()

    def drop(self, debtor: str) -> None:
        """End all loans of a debtor."""
        self._under_way.pop(debtor, None)
        self._peers.forget(debtor)  # first, so that nothing is being written from its desk
        self.loans.free_all(debtor)
        self._desks.close_all_but(self.loans.lent())
        self._on_change()

    def close(self) -> None:
        """End all loans."""
        for debtor in self.loans.lent():
            self.drop(debtor)

    def _go_on(self, debtor: str, wait_s: float) -> None:
        """Carry out a debtor's requests in order, until something is under way to it."""
        while debtor in self._waiting and self._is_settled(debtor, wait_s):
            requests = self._waiting.get(debtor)
            if requests is None:
                return  # it cannot be connected to
            request = requests[0]
            if isinstance(request, Reserve):
                self._drop_earlier(debtor, request)
            if not self._peers.is_open(debtor) and not isinstance(request, Free):
                self._under_way[debtor] = Opening(self._peers, debtor, self._answer_s)
                continue
            requests.popleft()
            if not requests:
                del self._waiting[debtor]
            self._carry_out(debtor, request)

    def _is_settled(self, debtor: str, wait_s: float) -> bool:
        """Tell whether nothing is under way to a debtor; one that cannot be reached is dropped."""
        under_way = self._under_way.get(debtor)
        if under_way is None:
            return True
        try:
            under_way.wait(wait_s)
        except TransferError as error:
            logger.warning("%s is gone, and its loans are freed: %s", debtor, error)
            if isinstance(under_way, Opening):
                self._waiting.pop(debtor, None)
            self.drop(debtor)
        except TimeoutError:
            return False
        self._under_way.pop(debtor, None)
        return True

    def _carry_out(self, debtor: str, request: Request) -> None:
        if isinstance(request, Free):
            if self.loans.free(debtor, request.number):
                self._desks.close_all_but(self.loans.lent())
                self._on_change()
            return
        try:
            answer, data = self._answer(debtor, request)
        except (Refusal, RuntimeError, ValueError, OSError, MemoryError) as error:
            answer, data = Refused(request.number, str(error)[:MAX_REASON]), []
        try:
            self._under_way[debtor] = self._calls.post(
                debtor, answer, self._answer_s, data, may_open=False
            )
        except TransferError as error:
            logger.warning("%s is gone, and its loans are freed: %s", debtor, error)
            self.drop(debtor)

    def _answer(
        self, debtor: str, request: Reserve | Store | Attend | Renew
    ) -> tuple[Answer, Descriptors]:
        if isinstance(request, Reserve):
            if self._is_borrowing():
                raise Refusal("the instance borrows itself")
            return self._reserve(debtor, request), []
        if isinstance(request, Store):
            return self._store(debtor, request), []
        if isinstance(request, Renew):
            return Renewed(request.number, tuple(self.loans.renew(debtor, request.loans))), []
        return self._attend(debtor, request)

    def _drop_earlier(self, debtor: str, request: Reserve) -> None:
        """Drop another process of that name, or one that has given this instance up."""
        known = self._desks.get(debtor)
        if known is not None and known.results_address != request.results_address:
            self.drop(debtor)

    def _reserve(self, debtor: str, request: Reserve) -> Reserved:
        *theirs, max_rows = request.geometry
        *ours, limit = self._geometry.numbers()
        if theirs != ours or not 1 <= max_rows <= limit:
            raise Refusal(f"geometry must be {ours} with 1 to {limit} rows, got {request.geometry}")
        known = self._desks.get(debtor)
        self.loans.reserve(debtor, request.number, request.num_blocks)
        if known is None:
            geometry = replace(self._geometry, max_rows=max_rows)
            try:
                known = self._desks.open(debtor, geometry, request.results_address)
            except BaseException:
                self.loans.free(debtor, request.number)
                raise
        self._on_change()
        lease_ms = int(self._lease_s * 1000)
        return Reserved(request.number, known.requests.address, self._num_staged, lease_ms)

    def _store(self, debtor: str, request: Store) -> Stored:
        loan = self.loans.use(debtor, request.loan)
        first, end = request.first_block, request.first_block + request.num_blocks
        is_next = first == loan.num_stored and first < end <= len(loan.block_ids)
        if not is_next or request.num_blocks > self._num_staged:
            raise Refusal(
                f"blocks must be the next of {len(loan.block_ids)} after {loan.num_stored}, at "
                f"most {self._num_staged}, got {first} to {end}"
            )
        staged = self._desk(debtor).requests.staged[: request.num_blocks]
        scatter_blocks(staged, loan.block_ids[first:end], self._view)
        loan.num_stored = end
        return Stored(request.number)

    def _attend(self, debtor: str, request: Attend) -> tuple[Attended, Descriptors]:
        parts = self._checked_parts(debtor, request.parts)
        if not 0 <= request.layer_index < self._geometry.num_layers:
            raise Refusal(f"layer_index must be a layer, got {request.layer_index}")
        desk = self._desk(debtor)
        num_rows = sum(q_len for q_len, _ in parts)
        if num_rows > desk.requests.queries.shape[0]:
            raise Refusal(f"parts must have at most the rows of max_rows, got {num_rows}")
        queries = desk.requests.queries[:num_rows]
        out, lse = self._attention.attend(request.layer_index, queries, parts)
        desk.results.out[:num_rows] = out
        desk.results.lse[:num_rows] = lse
        return Attended(request.number), desk.results.send(num_rows, desk.results_address)

    def _checked_parts(self, debtor: str, parts: Sequence[Part]) -> list[tuple[int, list[int]]]:
        """Return how many queries each part has, and its blocks, all of that debtor."""
        checked = []
        for part in parts:
            loan = self.loans.use(debtor, part.loan)
            if part.q_len < 1 or not 1 <= part.num_blocks == loan.num_stored:
                raise Refusal(
                    f"parts must have queries and the {loan.num_stored} blocks stored of loan "
                    f"{part.loan}, got {part.q_len} and {part.num_blocks}"
                )
            checked.append((part.q_len, loan.stored_ids))
        if not checked:
            raise Refusal("parts must not be empty")
        return checked

    def _desk(self, debtor: str) -> Desk:
        desk = self._desks.get(debtor)
        assert desk is not None, "a debtor with a loan has one"
        return desk
