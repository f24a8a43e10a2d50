"""An engine that lends its free blocks, and borrows those that its requests lack."""

import weakref
from collections.abc import Sequence

import torch

import mooncake_kernels as mk
from mooncake_kernels.closeable import Closeable
from mooncake_kernels.errors import InvalidArgument

from ...arguments import refuse
from ...engine.arguments import as_positive
from ...engine.batch import Batch
from ...engine.batching import BatchingEngine
from ...engine.errors import OutOfBlocks
from ...engine.kv_cache import PagedKVCache
from ...engine.llama import Llama
from ...engine.request import Request
from .. import Geometry, LenderFailed, LoanOptions, Manager, Member
from ..messages import MAX_PARTS
from .attention import DistPagedAttention
from .blocks import SharedAllocator
from .errors import LoansLost
from .scheduler import BorrowingScheduler

# Transfer engines whose notifications such an engine receives: of two, each would miss the other's.
_TAKEN: weakref.WeakSet[mk.TransferEngine] = weakref.WeakSet()


class DistAttentionEngine(BatchingEngine, Closeable):
    """Serve requests like ``BatchingEngine``, and some that its cache cannot hold.

    A request that does not fit into the free blocks is admitted if other instances lend the rest:
    they then hold the keys and values of its first tokens (DistAttention). The caches of all
    instances need the same dtype and shapes of blocks; their layouts and sizes may differ. Close
    the engine: it is a context manager. It is not thread-safe, but lends on a thread of its own.

    Args:
        model: the model.
        cache: as for ``BatchingEngine``, on the CPU.
        transfer: by which the instances reach each other, for this engine alone; not closed here.
        manager: knows the other instances: a ``LoanLedger``, or the way to one.
        loan_options: how it lends and borrows.
        min_own_blocks: a request that borrows has at least this many blocks here.
        max_batch_tokens, chunk_tokens, max_requests: as for ``BatchingEngine``; the last at most
            1024, which one message to a lender holds. An instance borrows only of those whose
            ``max_batch_tokens`` is at least its own.

    Raises:
        InvalidArgument: see ``BatchingEngine``; or the cache is on a GPU, or has fewer than
            ``min_own_blocks``; or another engine that is not closed uses ``transfer``.
    """

    def __init__(
        self,
        model: Llama,
        cache: PagedKVCache,
        transfer: mk.TransferEngine,
        manager: Manager,
        *,
        loan_options: LoanOptions | None = None,
        min_own_blocks: int = 4,
        max_batch_tokens: int = 512,
        chunk_tokens: int | None = None,
        max_requests: int = 64,
    ) -> None:
        super().__init__(
            model,
            cache,
            max_batch_tokens=max_batch_tokens,
            chunk_tokens=chunk_tokens,
            max_requests=max_requests,
        )
        if not isinstance(transfer, mk.TransferEngine):
            refuse("DistAttentionEngine", "transfer", "a TransferEngine", transfer)
        if transfer in _TAKEN:
            need = "of no other DistAttentionEngine"
            refuse("DistAttentionEngine", "transfer", need, transfer)
        if not isinstance(manager, Manager):
            refuse("DistAttentionEngine", "manager", "a Manager, as a LoanLedger is", manager)
        if not isinstance(loan_options, LoanOptions | None):
            refuse("DistAttentionEngine", "loan_options", "LoanOptions or None", loan_options)
        if cache.device.type != "cpu":
            refuse("DistAttentionEngine", "cache", "on the CPU", cache.device)
        min_own_blocks = as_positive("DistAttentionEngine", "min_own_blocks", min_own_blocks)
        if min_own_blocks > cache.num_blocks:
            wanted = f"at most the {cache.num_blocks} blocks of the cache"
            refuse("DistAttentionEngine", "min_own_blocks", wanted, min_own_blocks)
        self._is_closed = False
        limits_of = self.scheduler
        if limits_of.max_requests > MAX_PARTS:
            refuse(
                "DistAttentionEngine",
                "max_requests",
                f"at most {MAX_PARTS}",
                limits_of.max_requests,
            )
        self.allocator = blocks = SharedAllocator(cache.num_blocks)
        geometry = Geometry.of(cache, model.config.num_heads, limits_of.max_batch_tokens)
        self.member = Member(
            transfer, cache, geometry, blocks, manager, loan_options or LoanOptions()
        )
        self._transfer = transfer
        _TAKEN.add(transfer)
        self.scheduler: BorrowingScheduler = BorrowingScheduler(
            blocks,
            cache.block_size,
            member=self.member,
            min_own_blocks=min_own_blocks,
            max_batch_tokens=limits_of.max_batch_tokens,
            chunk_tokens=limits_of.chunk_tokens,
            max_requests=limits_of.max_requests,
        )

    @property
    def name(self) -> str:
        """Return the instance's name."""
        return self.member.name

    def close(self) -> None:
        """End all requests, and all loans; it serves no others. Idempotent."""
        self._is_closed = True
        for request_id in list(self._requests):
            self.abort(request_id)
        self.member.close()
        _TAKEN.discard(self._transfer)

    def _check_usable(self, op: str) -> None:
        if self._is_closed:
            raise InvalidArgument(f"{op}: the engine {self.name} is closed")
        super()._check_usable(op)

    def _check_fits(self, op: str, request: Request) -> None:
        """Accept what the model's context holds: how much can be borrowed is not known."""

    def _compute(self, work: Sequence[tuple[Request, int]]) -> None:
        """Run one batch.

        Raises:
            OutOfBlocks: nothing runs, and the next request lacks blocks here and elsewhere; step
                again later.
            LoansLost: a lender failed. The requests with blocks there have ended, and nothing
                else has changed; step again.
        """
        if not work and self.scheduler.waiting and not self._ready:
            needed = self.scheduler.num_blocks_for(self.scheduler.waiting[0])
            refusal = self.member.borrower.last_refusal
            raise OutOfBlocks(
                f"step: the next of {self.num_waiting} requests needs {needed} blocks, of which "
                f"{self.allocator.num_free} are free here; no instances lend the rest now"
                + (f" ({refusal})" if refusal else "")
            )
        try:
            for request, num_tokens in work:
                self.scheduler.make_room(request, num_tokens)
            super()._compute(work)
        except LenderFailed as error:
            raise self._end_requests_at(error) from error

    def _forward(
        self, work: Sequence[tuple[Request, int]], batch: Batch, ends: Sequence[int]
    ) -> torch.Tensor:
        loans = [self.scheduler.loans_of(request) for request, _ in work]
        attention = DistPagedAttention(batch, self.member.borrower, loans)
        return self.model.forward(batch, self.cache, requests=ends, attention=attention)

    def _end_requests_at(self, error: LenderFailed) -> LoansLost:
        """End the requests with blocks at an instance that has failed."""
        lost = [
            request.request_id
            for request in self.scheduler.running
            if any(loan.lender == error.instance for loan in self.scheduler.loans_of(request))
        ]
        for request_id in lost:
            self.abort(request_id)
        return LoansLost(error.instance, error.cause, lost)
