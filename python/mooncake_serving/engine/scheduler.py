"""Which requests run in the next step, and how many tokens of each."""

from collections import deque

from ..chunking import pack_batch
from .block_allocator import BlockAllocator
from .request import Request


class Scheduler:
    """Batch continuously, first come first served: decodes first, then prefill chunks (SARATHI).

    A request is admitted when every block it can ever need is free, so a running request never runs
    out and none is preempted. The head of the queue waits for its blocks; those behind wait for it.

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

    def next_step(self) -> list[tuple[Request, int]]:
        """Choose requests with the tokens to compute of each, and admit those that then fit."""
        decodes = [request for request in self.running if request.num_pending == 1]
        prefills = [request for request in self.running if request.num_pending > 1]
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
        """Forget a request and free its blocks."""
        (self.running if request in self.running else self.waiting).remove(request)
        self.allocator.free(request.block_ids)
        request.block_ids = []

    def _admit(self, request: Request) -> bool:
        num_blocks = self.num_blocks_for(request)
        if len(self.running) >= self.max_requests or num_blocks > self.allocator.num_free:
            return False
        request.block_ids = self.allocator.allocate(num_blocks)
        self.running.append(self.waiting.popleft())
        return True
