"""The prefill side: packs the blocks of requests, and writes them where receivers want them."""

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from math import lcm

import torch

import mooncake_kernels as mk
from mooncake_kernels.closeable import Closeable
from mooncake_kernels.errors import InvalidArgument, TransferError

from ...rpc import MAX_REASON, Message
from .endpoint import Endpoint
from .messages import (
    MAX_HEADER,
    MAX_NUMBERS,
    MAX_WANTS,
    Ask,
    Asking,
    Cancel,
    Chunk,
    Describe,
    Described,
    Ended,
    Grant,
    GroupForm,
    Release,
    Serving,
    Spare,
    Want,
)
from .outgoing import Demand, Piece, Places, Reception, Transfer
from .strips import NOTHING, Computed, Cursor, strips_of

logger = logging.getLogger(__name__)

SERVING_S = 1.0
MAX_REMEMBERED = 4096  # transfers that are over, so that a late receiver is told why


class Sender(Closeable):
    """Offers requests while they are prefilled, and streams their blocks to all who ask.

    Cache pages are read only by its threads, between ``progress`` and the return of ``pause`` or
    ``drop``, or the transfer's appearance in ``take_released``. Thread-safe.

    Args:
        endpoint: of this rank; not started yet.
        groups: its cache.
        engine_id: of its engine: receivers that want another one are refused.
        first_head: of this rank in the model, of the groups that have heads: as for
            ``GroupsPacker``.

    Attributes:
        strips: of the cache's layers, see ``progress``; one if the cache has several groups.

    Raises:
        InvalidArgument: a group is of an encoder or has a ``token_shard``, or a chunk's header is
            too large for a message.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        groups: mk.CacheGroups,
        *,
        engine_id: str,
        first_head: Mapping[str, int] | None = None,
    ):
        check_groups("Sender", groups)
        self._endpoint, self._settings = endpoint, endpoint.settings
        self._groups, self._engine_id = groups, engine_id
        self._first_head = first_head
        packer = mk.GroupsPacker(groups, first_head=first_head)
        one_each = packer.header(dict.fromkeys(groups, 1))
        if (size := len(one_each.to_bytes()) + 256) > MAX_HEADER:
            raise InvalidArgument(
                f"Sender: groups must have a header of at most {MAX_HEADER} bytes, got {size}"
            )
        self._record_bytes = {one.name: one.packed.record_bytes for one in one_each.groups}
        self.strips = _strips_of(groups)
        last = self.strips[-1].stop
        self._strip_bytes = [  # of a record of one strip, of two and so on: the first is smallest
            _record_bytes(groups, range(strip.start, last)) for strip in self.strips[:0:-1]
        ]
        self._on_gpu = groups.device.type == "cuda"
        num_slots, slot_bytes = self._settings.num_slots, self._settings.slot_bytes
        self._staging = torch.zeros(
            num_slots * _aligned(slot_bytes), dtype=torch.uint8, device=groups.device
        )
        self._region = endpoint.engine.register(self._staging, access="read")
        self._state = threading.Condition()
        self._transfers: dict[str, Transfer] = {}
        self._asks: dict[tuple[str, int], Demand] = {}
        self._turns: deque[Demand] = deque()  # who is served next
        self._early: dict[str, list[Demand]] = {}  # asked for before they are offered
        self._over: OrderedDict[str, str] = OrderedDict()  # transfers, and what became of them
        self._released: set[str] = set()
        self._ranks: list[str] = []
        self._describes: list[tuple[str, int]] = []  # that wait for these
        self._next_serving_s = 0.0
        self.closed = False
        for kind, handler in (
            (Ask, self._take_ask), (Grant, self._take_grant), (Cancel, self._take_cancel),
            (Asking, self._take_asking), (Release, self._take_release),
            (Describe, self._take_describe),
        ):  # fmt: skip
            endpoint.handle(kind, handler)
        endpoint.on_tick(self._tick)
        endpoint.on_failure(self._peer_failed)
        self._threads = [
            threading.Thread(
                target=self._serve,
                args=(self._slot(index),),
                name=f"handoff sender {index}",
                daemon=True,
            )
            for index in range(num_slots)
        ]
        for thread in self._threads:
            thread.start()

    # --- of the engine ------------------------------------------------------------------------

    def set_ranks(self, ranks: Sequence[str]) -> None:
        """Set the names of the transfer engines of all ranks, which receivers may ask this for."""
        with self._state:
            self._ranks = list(ranks)
            waiting, self._describes = self._describes, []
            for peer, number in waiting:
                self._endpoint.send(peer, Described(number, self._engine_id, self._ranks))

    def offer(self, transfer_id: str, digest: bytes, num_tokens: int) -> None:
        """Let a request be asked for, from before it is computed.

        Args:
            transfer_id: which the receiver names, too; not one that is offered already.
            digest: of its prompt; see ``Ask``.
            num_tokens: of its prompt.

        Raises:
            InvalidArgument: the transfer is offered already.
        """
        with self._state:
            if transfer_id in self._transfers:
                raise InvalidArgument(
                    f"offer: transfer_id must be of no current transfer, got {transfer_id!r}"
                )
            transfer = self._transfers[transfer_id] = Transfer(transfer_id, digest, num_tokens)
            if self._over.pop(transfer_id, None) in (RELEASED, CANCELLED):  # before it was offered
                transfer.is_unwanted = True
            for ask in self._early.pop(transfer_id, []):
                self._attach(ask, transfer)

    def progress(
        self,
        transfer_id: str,
        num_computed: int,
        block_ids: Mapping[str, Sequence[int]],
        *,
        num_layers: int | None = None,
        after: torch.cuda.Event | None = None,
    ) -> None:
        """Have what is computed by now sent; after ``pause``, from other blocks.

        Args:
            transfer_id: that was offered; one that is over meanwhile is ignored.
            num_computed: tokens whose blocks are complete.
            num_layers: in how many of the first layers, beyond what an earlier call has said of
                all layers: those of whole ``strips`` leave. None: in all.
            block_ids: the whole block table of each group so far, -1 where it has no block.
            after: on CUDA, an event after which these blocks are complete.
        """
        with self._state:
            transfer = self._transfers.get(transfer_id)
            if transfer is None:
                return
            transfer.block_ids = {name: list(ids) for name, ids in block_ids.items()}
            transfer.after, transfer.is_paused = after, False
            num_strips = len(self.strips)
            if num_layers is not None:
                num_strips = sum(strip.stop <= num_layers for strip in self.strips)
            if num_strips == len(self.strips):
                transfer.computed = Computed(num_computed)
            else:
                whole = transfer.computed.num_tokens
                transfer.computed = Computed(whole, max(whole, num_computed), num_strips)
            has_all = transfer.computed.num_tokens >= transfer.num_tokens
            if has_all and transfer.computed_s is None:
                transfer.computed_s = time.monotonic()
            for ask in transfer.asks:
                self._want(ask)
            self._settle(transfer)

    def pause(self, transfer_id: str) -> None:
        """Stop to read a request's blocks, which it has lost: when this returns, none is read.

        What was sent stays sent; ``progress`` continues, with other blocks.
        """
        with self._state:
            transfer = self._transfers.get(transfer_id)
            if transfer is not None:
                transfer.is_paused, transfer.computed = True, NOTHING
                for ask in transfer.asks:
                    self._spare(ask)
                self._state.wait_for(lambda: transfer.num_packing == 0)

    def drop(self, transfer_id: str, reason: str) -> None:
        """End a transfer: when this returns, its blocks are not read any more.

        Args:
            transfer_id: unknown ones, and those that are over, are ignored.
            reason: that receivers get, also those that come later.
        """
        with self._state:
            transfer = self._transfers.pop(transfer_id, None)
            if transfer is not None:
                transfer.computed_s = None  # what its last receiver ends is not a hand-over
            asks = [*(transfer.asks if transfer else ()), *self._early.get(transfer_id, ())]
            for ask in asks:
                self._finish(ask, reason)
            if transfer is None:
                if self._over.get(transfer_id, CANCELLED) == CANCELLED:
                    self._remember(transfer_id, reason)
                return
            self._state.wait_for(lambda: transfer.num_packing == 0)
            self._release(transfer, reason)

    def take_released(self) -> set[str]:
        """Return the transfers that need their blocks no longer, each once."""
        with self._state:
            released, self._released = self._released, set()
            return released

    def close(self) -> None:
        """End all transfers. Idempotent."""
        with self._state:
            if self.closed:
                return
            self.closed = True
            for ask in [*self._asks.values()]:
                self._finish(ask, "the sender was closed")
            self._state.notify_all()
        for thread in self._threads:
            thread.join()
        try:
            self._region.close()
        except TimeoutError as error:  # the engine keeps the memory
            logger.warning("hand-off: %s", error)

    # --- messages -----------------------------------------------------------------------------

    def _take_ask(self, peer: str, message: Ask) -> None:
        now = time.monotonic()
        ask = Demand(peer, message, now, now)
        wanted = message.engine_id
        with self._state:
            if ask.key in self._asks:
                return  # it is served already
            self._asks[ask.key] = ask
            if wanted not in ("", self._engine_id):
                self._finish(ask, f"the engine here is {self._engine_id}, not {wanted}")
            elif (transfer := self._transfers.get(message.transfer_id)) is not None:
                self._attach(ask, transfer)
            elif (over := self._over.get(message.transfer_id)) not in (None, CANCELLED):
                self._finish(ask, f"transfer {message.transfer_id} is over: {over}")
            else:  # also if an earlier receiver has given up: this one may be another try
                self._over.pop(message.transfer_id, None)
                self._early.setdefault(message.transfer_id, []).append(ask)

    def _take_grant(self, peer: str, message: Grant) -> None:
        with self._state:
            ask = self._asks.get((peer, message.number))
            if ask is None or ask.reason is not None or ask.num_wanted == 0:
                return  # its ``Ended`` gives the slot back
            ask.heard_s = time.monotonic()
            ask.num_wanted -= 1
            ask.slots.append((message.slot, message.address))
            self._spare(ask)
            self._state.notify()

    def _take_cancel(self, peer: str, message: Cancel) -> None:
        with self._state:
            ask = self._asks.get((peer, message.number))
            if ask is None:
                self._endpoint.send(peer, Ended(message.number, "it is not asked for here"))
                return
            if ask.reception is not None:
                ask.reception.done.add(peer)
            self._finish(ask, "the receiver has cancelled it")
            transfer_id = ask.ask.transfer_id
            if ask.transfer is None and transfer_id not in self._early:
                self._remember(transfer_id, CANCELLED)

    def _take_asking(self, peer: str, message: Asking) -> None:
        with self._state:
            for number in message.numbers:
                ask = self._asks.get((peer, number))
                if ask is not None:
                    ask.heard_s = time.monotonic()
                else:
                    reason = "the sender does not know it: all was sent, or it was restarted"
                    self._endpoint.send(peer, Ended(number, reason))

    def _take_release(self, peer: str, message: Release) -> None:
        if message.engine_id not in ("", self._engine_id):
            return
        with self._state:
            transfer = self._transfers.get(message.transfer_id)
            if transfer is None:
                if self._over.get(message.transfer_id, CANCELLED) == CANCELLED:
                    self._remember(message.transfer_id, RELEASED)
            elif not transfer.is_needed:
                transfer.is_unwanted = True
                self._settle(transfer)

    def _take_describe(self, peer: str, message: Describe) -> None:
        with self._state:
            if self._ranks:
                self._endpoint.send(peer, Described(message.number, self._engine_id, self._ranks))
            else:
                self._describes.append((peer, message.number))

    def _peer_failed(self, peer: str, error: TransferError, message: Message | None) -> None:
        """End all that a peer asks for; only what a message is about if it was not sent."""
        with self._state:
            for ask in [ask for ask in self._asks.values() if ask.peer == peer]:
                if message is None or message.number == ask.ask.number:
                    self._finish(ask, f"a message did not reach the receiver: {error.cause}")

    def _tick(self) -> None:
        now, settings = time.monotonic(), self._settings
        with self._state:
            for ask in [*self._asks.values()]:
                if now - ask.heard_s > settings.silence_s:
                    self._finish(ask, f"the receiver was silent for {settings.silence_s:g} s")
                elif ask.transfer is None and now - ask.started_s > settings.lease_s:
                    self._finish(ask, f"it was not offered within {settings.lease_s:g} s")
                elif ask.num_ready == 0 or ask.num_in_flight:
                    ask.moved_s = now
                elif now - ask.moved_s > settings.stall_s:
                    self._finish(ask, f"no chunk could be sent for {settings.stall_s:g} s")
            for transfer in [*self._transfers.values()]:
                computed_s = transfer.computed_s
                is_due = computed_s is not None and now - computed_s > settings.lease_s
                if is_due and not transfer.is_needed:
                    logger.warning(
                        "hand-off: %s was not asked for within %g s: its blocks are freed",
                        transfer.transfer_id,
                        settings.lease_s,
                    )
                    reason = f"it was not asked for within {settings.lease_s:g} s"
                    self._transfers.pop(transfer.transfer_id)
                    self._release(transfer, reason)
            if now >= self._next_serving_s:
                self._next_serving_s = now + SERVING_S
                by_peer: dict[str, list[int]] = {}
                for peer, number in self._asks:
                    by_peer.setdefault(peer, []).append(number)
                for peer, numbers in by_peer.items():
                    for first in range(0, len(numbers), MAX_NUMBERS):
                        part = numbers[first : first + MAX_NUMBERS]
                        self._endpoint.send(peer, Serving(0, part), repeats=True)

    # --- with the lock held -------------------------------------------------------------------

    def _attach(self, ask: Demand, transfer: Transfer) -> None:
        """Begin to serve a receiver, or say why not."""
        if reason := self._refusal(ask.ask, transfer):
            self._finish(ask, reason)
            return
        full = [group for group in self._groups.values() if group.kind == "full"]
        slot_bytes = min(ask.ask.slot_bytes, self._settings.slot_bytes)
        theirs = [form.tokens_per_block for form in ask.ask.groups if form.kind == "full"]
        ask.unit = lcm(*(group.tokens_per_block for group in full), *theirs)
        if full:
            ask.num_strips, unit = len(self.strips), ask.unit
            ask.tokens_of = lambda strips: slot_bytes // self._unit_bytes(unit, strips) * unit
            ask.cursor = Cursor(ask.ask.first_token // unit * unit)
        else:
            ask.cursor = Cursor(ask.ask.num_tokens)
        needed = self._groups.needed(ask.ask.num_tokens)
        for name, group in self._groups.items():
            if group.kind != "full":
                at_once = slot_bytes // self._record_bytes[name]
                places = needed[name]
                for first in range(places.start, places.stop, at_once):
                    ask.tails.append({name: range(first, min(first + at_once, places.stop))})
        ask.transfer, of_engine = transfer, Reception(ask.ask.num_receivers)
        ask.reception = transfer.receptions.setdefault(ask.ask.receiver_id, of_engine)
        ask.moved_s = time.monotonic()
        transfer.asks.append(ask)
        self._turns.append(ask)
        self._want(ask)

    def _refusal(self, ask: Ask, transfer: Transfer) -> str | None:
        """Return why an ask is not served."""
        ours = self._settings.model
        if ours and ask.model and ours != ask.model:
            return f"the model here is {ours}, not {ask.model}"
        if ask.num_tokens != transfer.num_tokens:
            return f"the prompt here has {transfer.num_tokens} tokens, not {ask.num_tokens}"
        if ask.digest != transfer.digest:
            return "the prompt here is another one"
        if ask.first_token >= ask.num_tokens:
            return f"the first token must be below {ask.num_tokens}, got {ask.first_token}"
        forms = {form.name: form for form in ask.groups}
        if set(forms) != set(self._groups):
            return f"the groups here are {sorted(self._groups)}, not {sorted(forms)}"
        for name, group in self._groups.items():
            if reason := _difference(group, forms[name]):
                return f"group {name} must have the same {reason}"
        slot_bytes = min(ask.slot_bytes, self._settings.slot_bytes)
        theirs = [form.tokens_per_block for form in ask.groups if form.kind == "full"]
        full = [group.tokens_per_block for group in self._groups.values() if group.kind == "full"]
        least = max(
            [self._unit_bytes(lcm(*full, *theirs)) if full else 0]
            + [self._record_bytes[g.name] for g in self._groups.values() if g.kind != "full"]
        )
        if least > slot_bytes:
            return f"slot_bytes must be at least {least} on both sides, got {slot_bytes}"
        return None

    def _unit_bytes(self, unit: int, num_strips: int | None = None) -> int:
        """Return the packed bytes of that many tokens, of groups that need all of the prefix.

        ``num_strips``: of so many strips, at most; None: of all.
        """
        record_bytes = self._record_bytes
        if num_strips is not None and num_strips < len(self.strips):
            record_bytes = dict.fromkeys(self._groups, self._strip_bytes[num_strips - 1])
        return sum(
            record_bytes[group.name] * unit // group.tokens_per_block
            for group in self._groups.values()
            if group.kind == "full"
        )

    def _want(self, ask: Demand) -> None:
        """Ask for slots for what is ready."""
        if ask.is_over:
            return
        wanted = min(MAX_WANTS, ask.num_ready) - ask.num_wanted - len(ask.slots)
        for _ in range(wanted):
            ask.num_wanted += 1
            self._endpoint.send(ask.peer, Want(ask.ask.number))
        if ask.slots:
            self._state.notify()

    def _spare(self, ask: Demand) -> None:
        """Give back slots for which nothing is ready, as of a request that is preempted."""
        while len(ask.slots) > ask.num_ready:
            slot, _ = ask.slots.pop()
            self._endpoint.send(ask.peer, Spare(ask.ask.number, slot))

    def _finish(self, ask: Demand, reason: str) -> None:
        """End an ask: no write of it begins any more; the receiver hears it when none is under way.

        ``reason`` is "" if all was written.
        """
        if ask.reason is None:
            ask.reason = reason
            if reason:
                logger.info("hand-off of %s to %s ends: %s", ask.ask.transfer_id, ask.peer, reason)
            if ask.transfer is not None:
                if ask.reception is not None and ask.peer not in ask.reception.done:
                    ask.reception.has_failed = True
                self._settle(ask.transfer)
            early = self._early.get(ask.ask.transfer_id, [])
            if ask in early:
                early.remove(ask)
                if not early:
                    del self._early[ask.ask.transfer_id]
        if ask.num_in_flight == 0 and self._asks.pop(ask.key, None) is not None:
            if ask in self._turns:
                self._turns.remove(ask)
            self._endpoint.send(ask.peer, Ended(ask.ask.number, ask.reason[:MAX_REASON]))

    def _settle(self, transfer: Transfer) -> None:
        """Release a transfer that all ranks of an engine are done with, if no other engine has a
        part of it and is to ask for the rest.

        Asks that were refused, or whose receiver is gone, do not count: another one may come within
        the lease.
        """
        if transfer.is_released or transfer.computed_s is None or transfer.is_needed:
            return
        if transfer.is_handed_over or transfer.is_unwanted:
            self._transfers.pop(transfer.transfer_id, None)
            what = "it was handed over" if transfer.is_handed_over else RELEASED
            self._release(transfer, what)

    def _release(self, transfer: Transfer, what_became: str) -> None:
        """Give a transfer's blocks back, which no thread reads now, nor will."""
        if not transfer.is_released:
            transfer.is_released = True
            for ask in transfer.asks:
                if not ask.is_over:
                    self._finish(ask, what_became)
            self._released.add(transfer.transfer_id)
            self._remember(transfer.transfer_id, what_became)

    def _remember(self, transfer_id: str, what_became: str) -> None:
        self._over[transfer_id] = what_became
        while len(self._over) > MAX_REMEMBERED:
            self._over.popitem(last=False)

    # --- its threads --------------------------------------------------------------------------

    def _slot(self, index: int) -> torch.Tensor:
        size = self._settings.slot_bytes
        first = index * _aligned(size)
        return self._staging[first : first + size]

    def _next(self) -> tuple[Demand, Piece, tuple[int, int]] | None:
        """Take the next chunk for which there is a landing slot; None if there is none now."""
        most = max(1, self._settings.num_slots // 2)  # a slow receiver does not take all threads
        in_flight: dict[str, int] = {}
        for ask in self._turns:
            in_flight[ask.peer] = in_flight.get(ask.peer, 0) + ask.num_in_flight
        for _ in range(len(self._turns)):
            ask = self._turns[0]
            self._turns.rotate(-1)
            if not ask.slots or ask.num_ready == 0 or ask.is_over:
                continue
            if in_flight[ask.peer] >= most:
                continue
            assert ask.transfer is not None, "what is ready is of a transfer"
            ask.num_in_flight += 1
            ask.transfer.num_packing += 1
            return ask, ask.take(self._groups, self.strips), ask.slots.popleft()
        return None

    def _serve(self, staging: torch.Tensor) -> None:
        """Pack and write chunks, by one slot of staging memory, until the sender is closed."""
        packers: dict[range | None, mk.GroupsPacker] = {}  # by the layers that they pack
        stream = torch.cuda.Stream(self._groups.device) if self._on_gpu else None
        while True:
            with self._state:
                while (work := self._next()) is None:
                    if self.closed:
                        return
                    self._state.wait(0.5)
                ask, (places, layers), slot = work
                transfer = ask.transfer
                assert transfer is not None, "it is that of the chunk"
                ids, after = transfer.ids_of(places), transfer.after
            header, reason = None, ""
            try:
                if ids is None:
                    raise InvalidArgument("progress: block_ids must have the computed tokens")
                if layers not in packers:
                    packers[layers] = mk.GroupsPacker(
                        self._groups, first_head=self._first_head, layers=layers
                    )
                header = self._pack(packers[layers], staging, places, ids, stream, after)
            except Exception as error:  # of this receiver: the others are served
                logger.exception("hand-off: %s was not packed", ask.ask.transfer_id)
                reason = f"a chunk was not packed: {error}"
            self._packed(ask, transfer, has_failed=bool(reason))
            if header is not None and ask.reason is None:
                try:
                    self._write(ask, staging, header, slot)
                except TransferError as error:
                    reason = f"a chunk was not written: {error.cause}"
                except Exception as error:  # likewise
                    logger.exception("hand-off: %s was not written", ask.ask.transfer_id)
                    reason = f"a chunk was not written: {error!r}"
            self._written(ask, reason)

    def _pack(
        self,
        packer: mk.GroupsPacker,
        staging: torch.Tensor,
        places: Places,
        ids: Mapping[str, Sequence[int]],
        stream: torch.cuda.Stream | None,
        after: torch.cuda.Event | None,
    ) -> mk.GroupsHeader:
        first_blocks = {name: of_group.start for name, of_group in places.items()}
        if stream is None:
            return packer.pack(ids, staging, first_blocks=first_blocks)
        with torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            header = packer.pack(ids, staging, first_blocks=first_blocks)
            packer.check()  # also waits: the blocks may be given away, and the staging is sent
        return header

    def _packed(self, ask: Demand, transfer: Transfer, *, has_failed: bool) -> None:
        """Note that a thread reads a transfer's blocks no longer."""
        with self._state:
            transfer.num_packing -= 1
            is_last = ask.cursor.token >= ask.ask.num_tokens and not ask.tails
            if is_last and not has_failed and not ask.is_over:
                ask.is_served = True
                assert ask.reception is not None, "it has one with its transfer"
                ask.reception.done.add(ask.peer)
            self._settle(transfer)
            self._state.notify_all()

    def _write(
        self, ask: Demand, staging: torch.Tensor, header: mk.GroupsHeader, slot: tuple[int, int]
    ) -> None:
        number, address = slot
        chunk = Chunk(ask.ask.number, number, header.to_bytes())
        self._endpoint.write(ask.peer, [(staging.data_ptr(), address, header.num_bytes)], chunk)

    def _written(self, ask: Demand, reason: str) -> None:
        with self._state:
            ask.num_in_flight -= 1
            if reason or ask.reason is not None:
                self._finish(ask, reason)
            elif ask.is_served and ask.num_in_flight == 0:
                self._finish(ask, "")
            else:
                self._want(ask)
            self._state.notify()


RELEASED = "no one needs it"
CANCELLED = "its receiver has cancelled it"  # before it was offered, and not asked for since


def _strips_of(groups: mk.CacheGroups) -> list[range]:
    """Return the strips in which a cache's layers may leave: one if layers are no common order."""
    counts = {view.num_layers for group in groups.values() for view in group.views}
    if len(groups) > 1 or len(counts) > 1 or any(g.kind != "full" for g in groups.values()):
        return [range(max(counts))]
    return strips_of(*counts)


def _record_bytes(groups: mk.CacheGroups, layers: range) -> int:
    """Return the bytes of a packed block of these layers of a cache of one group."""
    [packed] = mk.GroupsPacker(groups, layers=layers).header(dict.fromkeys(groups, 1)).groups
    return packed.packed.record_bytes


def check_groups(op: str, groups: mk.CacheGroups) -> None:
    """Refuse a cache that cannot be handed over."""
    for group in groups.values():
        if group.kind == "encoder":
            raise InvalidArgument(f"{op}: groups must not be of an encoder, got {group.name!r}")
        if group.token_shard.num_ranks > 1:
            raise InvalidArgument(
                f"{op}: groups must have all tokens of a request, got {group.name!r} with "
                f"token_shard {group.token_shard[:]}"
            )


def forms_of(groups: mk.CacheGroups) -> list[GroupForm]:
    """Return what a sender must know of a receiver's cache."""
    return [
        GroupForm(group.name, group.kind, group.window, group.tokens_per_block)
        for group in groups.values()
    ]


def _difference(group: mk.CacheGroup, form: GroupForm) -> str | None:
    """Return in what a receiver's group must not differ, and does."""
    fields: Iterable[str] = ("kind", "window")
    if group.kind != "full" or not group.has_tokens:
        fields = (*fields, "tokens_per_block")
    for name in fields:
        if getattr(group, name) != getattr(form, name):
            return f"{name} on both sides: {getattr(group, name)} and {getattr(form, name)}"
    return None


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 128) * 128
