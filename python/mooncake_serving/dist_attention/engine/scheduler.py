"""Admission of requests that need more blocks than are free here, and where their blocks are."""

import time

from ...engine.request import Request
from ...engine.scheduler import Scheduler
from .. import Borrowed, Member
from .blocks import SharedAllocator


class BorrowingScheduler(Scheduler):
    """A ``Scheduler`` that borrows what a request lacks, when it is admitted: all or nothing.

    A request's own blocks then are a window that slides over its tokens: before a step whose tokens
    would end behind it, the oldest full blocks move to the lenders, in the order of the loans,
    and are used again. So tokens are in order: those at the first lender, at the next, here.

    Args:
        allocator: of the engine's blocks.
        block_size: tokens in a block.
        member: borrows.
        min_own_blocks: a request that borrows has at least this many here.
        limits: as for ``Scheduler``.
    """

    def __init__(
        self,
        allocator: SharedAllocator,
        block_size: int,
        *,
        member: Member,
        min_own_blocks: int,
        **limits: int,
    ) -> None:
        super().__init__(allocator, block_size, **limits)
        self._blocks, self._member, self._min_own = allocator, member, min_own_blocks
        self._loans: dict[int, list[Borrowed]] = {}  # by request
        self._refused: tuple[int, int] | None = None  # the request, and what was free here then
        self._refused_s = 0.0

    def loans_of(self, request: Request) -> list[Borrowed]:
        """Return what a request has borrowed, in the order of its tokens."""
        return self._loans.get(request.request_id, [])

    def next_step(self) -> list[tuple[Request, int]]:
        """Choose as ``Scheduler`` does; a request's tokens end where its window can."""
        return [(r, min(num_tokens, self._room(r))) for r, num_tokens in super().next_step()]

    def make_room(self, request: Request, num_tokens: int) -> None:
        """Move blocks to the lenders until the next ``num_tokens`` tokens fit in what is here.

        Raises:
            LenderFailed: the lender is gone; the request's window is as it was.
        """
        end = request.num_computed + num_tokens
        first = request.num_lent // self.block_size
        excess = -(-end // self.block_size) - first - len(request.block_ids)
        for loan in self.loans_of(request):
            while (count := min(excess, loan.num_blocks - loan.num_stored)) > 0:
                ids = request.block_ids
                count = self._member.borrower.store(loan, ids[:count])
                request.block_ids = ids[count:] + ids[:count]
                request.num_lent += count * self.block_size
                excess -= count

    def finish(self, request: Request) -> None:
        """Forget a request, and free its blocks here and elsewhere."""
        super().finish(request)
        self._member.borrower.free(self.loans_of(request))
        self._loans.pop(request.request_id, None)  # last: until then all of them can be freed again

    def _room(self, request: Request) -> int:
        """Count the tokens that fit if all full blocks move."""
        num_full = request.num_computed // self.block_size
        return (num_full + len(request.block_ids)) * self.block_size - request.num_computed

    def _admit(self, request: Request) -> bool:
        if len(self.running) >= self.max_requests:
            return False
        free = self.allocator.num_free
        is_recent = time.monotonic() < self._refused_s + self._member.heartbeat_s
        if self.running and is_recent and self._refused == (request.request_id, free):
            return False  # nothing has changed, as far as is known; asking costs round trips
        num_blocks = self.num_blocks_for(request)
        own = self._blocks.take_up_to(num_blocks, min(num_blocks, self._min_own))
        if own is None:
            self._member.borrower.last_refusal = ""  # no one was asked
            return False
        try:
            is_complete = len(own) == num_blocks or self._borrow(request, num_blocks - len(own))
        except BaseException:
            self.allocator.free(own)
            raise
        if not is_complete:
            self.allocator.free(own)
            self._refused, self._refused_s = (request.request_id, free), time.monotonic()
            return False
        request.block_ids = own
        self.running.append(request)
        self._complete_admission()
        return True

    def _borrow(self, request: Request, num_blocks: int) -> bool:
        loans = self._member.reserve(num_blocks)
        if loans:
            self._loans[request.request_id] = loans
        return bool(loans)
