"""The prefill worker: computes prompts, and writes their blocks into a decode worker's memory."""

from multiprocessing.connection import Connection

import mooncake_kernels as mk

from .messages import Abort, Computed, Handover, Prefill, PrefillEnded, Target, WorkerOptions
from .worker import Worker


class PrefillWorker(Worker):
    """Prefill, name, gather, send: one request at a time."""

    def __init__(self, pipe: Connection, options: WorkerOptions):
        super().__init__(pipe, options, access="read")
        self._peers: dict[str, mk.transfer.Peer] = {}
        self._waiting: dict[int, Prefill] = {}  # by request, in order

    def handle(self, command: Prefill | Abort) -> None:
        """Queue a prompt, or drop it; one that has begun by then is finished."""
        if isinstance(command, Prefill):
            self._waiting[command.request_id] = command
        elif self._waiting.pop(command.request_id, None):
            self.report(PrefillEnded(command.request_id))

    def work(self) -> bool:
        """Serve the next prompt."""
        if not self._waiting:
            return False
        self.attempt(self._prefill, self._waiting.pop(next(iter(self._waiting))))
        return True

    def _prefill(self, command: Prefill) -> None:
        """Compute a prompt and send its blocks to their target."""
        job, target = command.job, command.target
        num_blocks = self.num_blocks_for(len(job.prompt_tokens))
        with self.timed("written", num_blocks * self.view.block_bytes):
            prefilled = self.engine.prefill(
                job.prompt_tokens,
                job.params,
                on_chunk=lambda chunk: self.report(Computed(command.request_id, chunk.stop)),
            )
        first_row = self.staging.allocate(num_blocks)
        assert first_row is not None, "one request at a time, and it fits"
        try:
            with self.timed("named", 4 * len(job.prompt_tokens)):
                keys = mk.block_hashes(job.prompt_tokens, self.options.block_size)
            with self.timed("gathered", target.num_bytes):
                rows = self.staging.gather(prefilled.block_ids, first_row)
            last_key = int(keys[-1]) if len(keys) else None
            handover = Handover(command.request_id, prefilled.first_token, last_key)
            with self.timed("moved", target.num_bytes):
                self._send(rows.data_ptr(), target, handover.encode())
        finally:
            self.staging.free(first_row, num_blocks)
            self.engine.release(prefilled.block_ids)
        self.report(PrefillEnded(command.request_id))

    def _send(self, address: int, target: Target, handover: bytes) -> None:
        name = target.engine_name
        if name not in self._peers:
            self._peers[name] = self.transfer.open(
                name, allow_file=False, deadline_s=self.options.deadline_s
            )
        ticket = self.transfer.write(
            self._peers[name],
            [(address, target.address, target.num_bytes)],
            deadline_s=self.options.deadline_s,
            notify=handover,
        )
        ticket.wait()
