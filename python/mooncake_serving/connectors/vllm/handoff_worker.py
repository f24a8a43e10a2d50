"""A worker's part of a hand-off between two engines of vLLM: ``HandoffWorker``."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument, Unavailable

from ..handoff import INDIVISIBLE, REPLICATED, Endpoint, Receiver, Sender, first_head
from .caches import state_rows
from .handoff_step import HandoffOptions, HandoffStep
from .steps import NULL_BLOCK, GroupForm

log = logging.getLogger("mooncake_serving.connectors.vllm")

CPU_AXES = {2: "block dim", 3: "block dim", 4: "block head dim"}  # tokens have an order of its own
AXES = {3: "block token dim", 4: "block head token dim"}


@dataclass
class Results:
    """Requests that ended, as vLLM's connectors report them.

    Attributes:
        sent: whose blocks may be freed.
        received: whose blocks are not written any more, those that failed among them.
        failed: that have not come.
    """

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class HandoffWorker:
    """Sends and receives requests' blocks, in its own threads. Imports nothing of vLLM.

    Args:
        options: of the engine.
        engine_id: of the engine.
        groups: that are handed over.
        layers: the names of each group's layers.
        num_blocks: of the engine's cache.
        rank, num_ranks: of tensor parallelism.
        num_heads: KV heads of the model.
        sends: whether requests may be prefilled here for other engines.
        receives: whether requests may be prefilled elsewhere for this one.
    """

    def __init__(
        self,
        options: HandoffOptions,
        engine_id: str,
        groups: Sequence[GroupForm],
        layers: Sequence[Sequence[str]],
        *,
        num_blocks: int,
        rank: int,
        num_ranks: int,
        num_heads: int,
        sends: bool,
        receives: bool,
    ):
        self._options, self._engine_id = options, engine_id
        self._forms, self._layers, self._num_blocks = groups, layers, num_blocks
        self._rank, self._num_ranks, self._num_heads = rank, num_ranks, num_heads
        self._sends, self._receives = sends, receives
        self._parts: dict[str, int] = {}  # of the cache's blocks in one of the engine's
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        self._request_of: dict[str, str] = {}  # by transfer that is offered here
        self._released: set[str] = set()  # requests whose blocks are not needed, but not over
        self._finished: set[str] = set()  # the other way round
        self._failed: dict[str, str] = {}  # requests that were refused at once
        self._on_gpu = False

    @property
    def address(self) -> str:
        """Where this rank is reached; only after ``register_kv_caches``."""
        return self._engine.name

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Set the caches, and listen for other engines.

        Args:
            kv_caches: a tensor a layer, by name; of a recurrent layer a tensor or several.

        Raises:
            Unavailable: the form of the caches is unknown.
            OSError, Unavailable: see ``mk.TransferEngine``.
        """
        groups, heads = self._groups(kv_caches)
        self._on_gpu = groups.device.type == "cuda"
        options = self._options
        port = options.port if self._rank == 0 else 0
        host = f"[{options.host}]" if ":" in options.host else options.host
        name = f"{host}:{port}" if host else None
        self._engine = mk.TransferEngine(name, transports=options.transports)
        self._endpoint = Endpoint(self._engine, options.settings)
        if self._sends:
            self._sender = Sender(
                self._endpoint,
                groups,
                engine_id=self._engine_id,
                first_head={
                    name: first_head(count, self._rank, self._num_ranks)
                    for name, count in heads.items()
                },
            )
        if self._receives:
            self._receiver = Receiver(
                self._endpoint,
                groups,
                num_heads=heads,
                rank=self._rank,
                num_ranks=self._num_ranks,
            )
        if self._sender is not None and self._num_ranks == 1:
            self._sender.set_ranks([self.address])
        self._endpoint.start()
        log.info("hand-off: rank %d of %s is at %s", self._rank, self._engine_id, self.address)

    def preempted(self, step: HandoffStep) -> None:
        """Stop to read blocks that the step may overwrite: before it."""
        if self._sender is not None:
            for transfer_id in step.pauses:
                self._sender.pause(transfer_id)

    def start(self, step: HandoffStep) -> None:
        """Begin and end what the scheduler says; it waits for no peer."""
        self.preempted(step)
        if self._sender is not None:
            if step.ranks:
                self._sender.set_ranks(step.ranks)
            for transfer_id, reason in step.drops:  # first: one may be offered again by its name
                self._sender.drop(transfer_id, reason)
        if self._receiver is not None:
            after = self._event()
            for one in step.receives:
                try:
                    self._receiver.receive(
                        one.request_id,
                        one.source,
                        one.transfer_id,
                        one.digest,
                        self._by_group(one.block_ids),
                        one.num_tokens,
                        first_token=one.first_token,
                        after=after,
                        receiver_id=one.receiver_id,
                    )
                except InvalidArgument as error:
                    self._failed[one.request_id] = str(error)
            for request_id in step.cancels:
                self._receiver.cancel(request_id)
                self._request_of = {  # one that was offered, too, is reported as received alone
                    transfer_id: offered
                    for transfer_id, offered in self._request_of.items()
                    if offered != request_id
                }
            if self._rank == 0:
                for source, transfer_id in step.releases:
                    self._receiver.release(source, transfer_id)
        if self._sender is not None:
            for offer in step.offers:
                self._request_of[offer.transfer_id] = offer.request_id
                self._sender.offer(offer.transfer_id, offer.digest, offer.num_tokens)

    def save(self, step: HandoffStep) -> None:
        """Have what the step has computed sent: after it."""
        if self._sender is not None and step.progress:
            after = self._event()
            for one in step.progress:
                tables = self._by_group(one.block_ids)
                self._sender.progress(one.transfer_id, one.num_computed, tables, after=after)

    def results(self, finished: set[str]) -> Results:
        """Return what has ended since the last call, each request once.

        Args:
            finished: requests that vLLM has finished since.
        """
        results = Results()
        if self._sender is not None:
            offered = {*self._request_of.values()}
            self._finished |= finished & offered
            for transfer_id in self._sender.take_released():
                if request_id := self._request_of.get(transfer_id):
                    self._released.add(request_id)
            results.sent = self._released & self._finished
            self._released -= results.sent
            self._finished -= results.sent
            self._request_of = {
                transfer_id: request_id
                for transfer_id, request_id in self._request_of.items()
                if request_id not in results.sent
            }
        failed, self._failed = self._failed, {}
        if self._receiver is not None:
            for result in self._receiver.take_results():
                results.received.add(result.request_id)
                if result.error is not None:
                    failed[result.request_id] = result.error
        for request_id, error in failed.items():
            log.error("hand-off of %s failed: %s", request_id, error)
        results.failed = set(failed)
        results.received |= results.failed
        return results

    def close(self) -> None:
        """End all; memory is not touched any more. Idempotent."""
        for part in (self._sender, self._receiver):
            if part is not None:
                part.close()
        if self._sender is not None or self._receiver is not None:
            self._endpoint.close()
            self._engine.close()

    def _event(self) -> torch.cuda.Event | None:
        """Return what marks the work that is queued now on a GPU."""
        if not self._on_gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _by_group(self, tables: Sequence[Sequence[int]]) -> dict[str, list[int]]:
        """Return block tables as of the caches, whose blocks may be parts of the engine's: -1 where
        vLLM has its null block, as before a window.
        """
        return {
            name: [
                -1 if block == NULL_BLOCK else block * parts + part
                for block in table
                for part in range(parts)
            ]
            for (name, parts), table in zip(self._parts.items(), tables, strict=True)
        }

    def _groups(self, kv_caches: Mapping[str, Any]) -> tuple[mk.CacheGroups, dict[str, int]]:
        """Return the caches as groups, and the heads of each in the model."""
        groups, heads = [], {}
        for index, (form, names) in enumerate(zip(self._forms, self._layers, strict=True)):
            name, layers = str(index), [kv_caches[one] for one in names if one in kv_caches]
            if form.kind == "state":
                several = ([one] if isinstance(one, torch.Tensor) else one for one in layers)
                layers = [state_rows(state) for states in several for state in states]
            views, heads[name] = self._views(layers, has_states=form.kind == "state")
            parts = views[0].num_blocks // self._num_blocks
            self._parts[name] = parts
            groups.append(
                mk.CacheGroup(
                    name,
                    views,
                    form.kind,
                    window=form.window,
                    tokens_per_block=form.tokens_per_block // parts,
                )
            )
        return mk.CacheGroups(*groups), heads

    def _views(
        self, layers: Sequence[torch.Tensor], *, has_states: bool
    ) -> tuple[list[mk.KVView], int]:
        """Return views of a group's layers, and the heads that they have in the model."""
        by_form: dict[Any, list[torch.Tensor]] = {}
        for layer in {layer.data_ptr(): layer for layer in layers}.values():
            axes = (CPU_AXES if layer.device.type == "cpu" else AXES).get(layer.dim())
            if has_states:
                axes = "block dim" if len(layer) == self._num_blocks else None
            if axes is None or not layer.shape[0] or layer.shape[0] % self._num_blocks:
                raise Unavailable(
                    "hand-off: caches must be [num_blocks, (head), (token), dim] for the engine's "
                    f"{self._num_blocks} blocks, got {tuple(layer.shape)}"
                )
            if layer.device.type == "cpu":
                # Within a head of a block, vLLM's attention on a CPU orders tokens as it likes.
                layer = layer.view(*layer.shape[: len(axes.split()) - 1], -1)
            form = (axes, layer.shape, layer.stride(), layer.dtype)
            by_form.setdefault(form, []).append(layer)
        if not by_form:
            raise Unavailable("hand-off: the model must have caches, got none")
        own = max(1, self._num_heads // self._num_ranks)
        has_heads = ["head" in axes for axes, *_ in by_form]
        for axes, shape, *_ in by_form:
            if "head" in axes and shape[1] != own:
                raise Unavailable(
                    f"hand-off: caches must have {own} heads on each of {self._num_ranks} ranks, "
                    f"got {shape[1]}"
                )
        if len({*has_heads}) > 1:
            raise Unavailable("hand-off: caches of a group must all have heads, or none")
        views = [mk.KVView(tensors, axes) for (axes, *_), tensors in by_form.items()]
        if has_states:
            return views, INDIVISIBLE
        return views, self._num_heads if has_heads[0] else REPLICATED
