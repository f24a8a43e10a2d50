"""The hand-offs of an engine process: prompts' blocks that leave, and those that come."""

import secrets
from collections.abc import Sequence
from dataclasses import replace

import torch

import mooncake_kernels as mk
from mooncake_kernels.closeable import Closeable
from mooncake_serving.connectors.handoff import (
    Endpoint,
    HandoffSettings,
    Receiver,
    Result,
    Sender,
    answer_params,
    digest_of_tokens,
)
from mooncake_serving.engine import Engine

from .job import NUM_EXACT, NUM_SIMILAR, Fetch, Job, Send

GROUP = "0"  # a Llama's cache is one group
SETTINGS = HandoffSettings(slot_bytes=8 << 20)


class Transfers(Closeable):
    """Offers prompts while they are prefilled, and receives others. For the engine's thread alone.

    What is handed over is the prompt without its last token, which the other engine computes for
    the next one.

    Args:
        engine: whose blocks are sent, or written.
        transfer: by which other engines are reached; closed with this.
        sends, receives: which of the two there is.
        model: what distinguishes it from others: engines refuse each other's blocks without it.
        settings: of the hand-offs.
    """

    def __init__(
        self,
        engine: Engine,
        transfer: mk.TransferEngine,
        *,
        sends: bool,
        receives: bool,
        model: str,
        settings: HandoffSettings = SETTINGS,
    ):
        self._engine, self._transfer = engine, transfer
        self._engine_id = secrets.token_hex(8)
        groups = mk.CacheGroups(mk.CacheGroup(GROUP, engine.cache.view()))
        self._endpoint = Endpoint(transfer, replace(settings, model=model))
        self._sender = self._receiver = None
        if sends:
            self._sender = Sender(self._endpoint, groups, engine_id=self._engine_id)
            self._sender.set_ranks([transfer.name])
        if receives:
            heads = {GROUP: engine.model.config.num_kv_heads}
            self._receiver = Receiver(self._endpoint, groups, num_heads=heads)
        self._held: dict[str, list[int]] = {}  # by transfer: blocks that its receivers may need
        self._fetched: dict[str, tuple[Job, list[int]]] = {}  # by request, with its blocks
        self._endpoint.start()

    @property
    def is_busy(self) -> bool:
        """Whether anything is under way, so that ``poll`` may return something."""
        return bool(self._held or self._fetched)

    def offer(self, job: Job, send: Send) -> None:
        """Let another engine ask for a prompt that is going to be computed here.

        Raises:
            InvalidArgument: another one has the transfer's name.
        """
        assert self._sender is not None, "only engines that send get such requests"
        num_tokens = len(job.prompt) - 1
        digest = digest_of_tokens(job.prompt[:num_tokens])
        self._sender.offer(send.transfer_id, digest, num_tokens)
        self._held[send.transfer_id] = []

    def computed(
        self, job: Job, send: Send, block_ids: Sequence[int], num_computed: int, num_layers: int
    ) -> None:
        """Have what is computed of a prompt sent; its blocks stay until no one needs them.

        Args:
            job: the request.
            send: as which it was offered.
            block_ids: of the request.
            num_computed: tokens that have their keys and values, or, on CUDA, will have them after
                what is queued.
            num_layers: in so many of the first layers; what was computed before, in all.
        """
        assert self._sender is not None, "it was offered"
        held = self._held.get(send.transfer_id)
        if held is None:  # the lease is over, or it was dropped
            return
        if not any(num_layers == strip.stop for strip in self._sender.strips):
            return
        num_tokens = len(job.prompt) - 1
        needed = block_ids[: self._engine.cache.num_blocks_for(num_tokens)]
        if not held:
            self._engine.allocator.share(needed)
            held.extend(needed)
        after = None
        if self._engine.cache.device.type == "cuda":
            after = torch.cuda.Event()
            after.record()
        self._sender.progress(
            send.transfer_id,
            min(num_computed, num_tokens),
            {GROUP: needed},
            num_layers=num_layers,
            after=after,
        )

    def pause(self, send: Send) -> None:
        """Stop to read a prompt's blocks, which are going to be computed again."""
        assert self._sender is not None, "it was offered"
        self._sender.pause(send.transfer_id)

    def answer(self, job: Job, send: Send) -> dict[str, object]:
        """Return the ``kv_transfer_params`` with which another engine fetches a prompt."""
        ranks, num_tokens = [self._transfer.name], len(job.prompt) - 1
        transfer_id = send.transfer_id
        params = answer_params(ranks, self._engine_id, transfer_id, job.request_id, num_tokens)
        if job.is_semantic:
            num_similar = job.num_similar_tokens
            params[NUM_EXACT] = job.num_cached_tokens if num_similar else len(job.prompt)
            params[NUM_SIMILAR] = num_similar
        return params

    def drop(self, send: Send, reason: str) -> None:
        """End what was offered: its blocks are not read any more. Unknown ones are ignored."""
        if self._sender is not None:
            self._sender.drop(send.transfer_id, reason)
            self._free_released()

    def fetch(self, job: Job, fetch: Fetch, block_ids: list[int], num_cached_tokens: int) -> None:
        """Have a prompt sent into blocks, behind the cached tokens; ``poll`` returns it.

        Raises:
            InvalidArgument: the transfer cannot be asked for; the blocks stay the caller's.
        """
        assert self._receiver is not None, "only engines that receive get such requests"
        num_tokens = len(job.prompt) - 1
        self._receiver.receive(
            job.request_id,
            fetch.source,
            fetch.transfer_id,
            digest_of_tokens(job.prompt[:num_tokens]),
            {GROUP: block_ids},
            num_tokens,
            first_token=num_cached_tokens,
            receiver_id=self._engine_id,
        )
        self._fetched[job.request_id] = (job, block_ids)

    def release(self, fetch: Fetch) -> None:
        """Tell the engine that has prefilled that its blocks are not needed."""
        assert self._receiver is not None, "only engines that receive get such requests"
        self._receiver.release(fetch.source, fetch.transfer_id)

    def cancel(self, job: Job) -> bool:
        """End what is fetched for a request, and free its blocks; False if nothing is."""
        if self._receiver is None or job.request_id not in self._fetched:
            return False
        self._receiver.cancel(job.request_id)
        _, block_ids = self._fetched.pop(job.request_id)
        self._engine.release(block_ids)
        return True

    def poll(self) -> list[tuple[Job, list[int], str | None]]:
        """Return the requests whose prompts have come: their blocks, or why they have not.

        In the second case the blocks are free again. Blocks that no other engine needs are freed.
        """
        self._free_released()
        results: list[Result] = [] if self._receiver is None else self._receiver.take_results()
        ended = []
        for result in results:
            job, block_ids = self._fetched.pop(result.request_id, (None, []))
            if job is None:  # it was cancelled
                continue
            if result.error is not None:
                self._engine.release(block_ids)
            ended.append((job, block_ids, result.error))
        return ended

    def close(self) -> None:
        """End all of it. Idempotent."""
        for part in (self._sender, self._receiver):
            if part is not None:
                part.close()
        self._endpoint.close()
        self._transfer.close()

    def _free_released(self) -> None:
        if self._sender is not None:
            for transfer_id in self._sender.take_released():
                self._engine.allocator.free(self._held.pop(transfer_id, []))
