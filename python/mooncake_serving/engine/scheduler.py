"""Which requests run in the next step, and how many tokens of each."""

from collections import deque

from ..chunking import pack_batch
from .block_allocator import BlockAllocator
from .errors import OutOfBlocks
from .request import Request


class Scheduler:
    """Batch continuously, first come first served: decodes first, then prefill chunks (SARATHI).

    A request is admitted when every block it can ever need is free, so a running request never runs
    out and none is preempted. The head of the queue waits for its blocks; those behind wait for it.
    Requests that came with their blocks, as prompts that were prefilled elsewhere, come before.

    A step that Ctrl-C interrupts may be chosen again.

    Args:
        allocator: of the blocks.
        block_size: tokens in a block.
        max_batch_tokens: tokens of one step, over all requests.
        chunk_tokens: tokens of one request in one step.
        max_requests: requests of one step.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        block_size: int,
        *,
        max_batch_tokens: int,
        chunk_tokens: int,
        max_requests: int,
    ) -> None:
        self.allocator, self.block_size = allocator, block_size
        self.max_batch_tokens, self.chunk_tokens = max_batch_tokens, chunk_tokens
        self.max_requests = max_requests
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def num_blocks_for(self, request: Request) -> int:
        """Count the blocks that a request can ever need."""
        return -(-request.max_kv_tokens // self.block_size)

    def add_with_blocks(self, request: Request) -> None:
        """Queue a request that has its blocks, behind others of its kind."""
        self._complete_admission()
        index = sum(1 for waiting in self.waiting if waiting.block_ids)
        self.waiting.insert(index, request)

    def next_step(self) -> list[tuple[Request, int]]:
        """Choose requests with the tokens to compute of each, and admit those that then fit."""
        self._complete_admission()
        # All that is to be computed of a request may be under way, in a pipeline.
        running = [one for one in self.running if one.num_pending or not one.num_under_way]
        decodes = [request for request in running if request.num_pending == 1]
        prefills = [request for request in running if request.num_pending != 1]
        return pack_batch(
            decodes,
            prefills,
            self.max_batch_tokens,
            waiting=list(self.waiting),
            admit=self._admit,
            max_chunk=self.chunk_tokens,
            max_requests=self.max_requests,
        ).chunks

    def finish(self, request: Request) -> None:
        """Forget a request and free its blocks; repeated, it does nothing."""
        self._complete_admission()
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self.allocator.free_all(request.block_ids)

    def _admit(self, request: Request) -> bool:
        if len(self.running) >= self.max_requests:
            return False
        if not request.block_ids:
            num_blocks = self.num_blocks_for(request)
            try:
                num_cached = self.allocator.allocate_for(
                    request.tokens, num_blocks, into=request.block_ids
                )
            except OutOfBlocks:
                return False
            request.num_computed = request.num_cached_tokens = num_cached
        self.running.append(request)
        self._complete_admission()
        return True

    def _complete_admission(self) -> None:
        """Take the request that runs last out of the queue, and complete what blocks it has."""
        self.allocator.complete()
        if self.waiting and self.running and self.waiting[0] is self.running[-1]:
            self.waiting.popleft()
