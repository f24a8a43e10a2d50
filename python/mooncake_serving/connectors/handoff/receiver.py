"""The decode side: asks for the blocks of requests, and unpacks what is written for it."""

import itertools
import logging
import math
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch

import mooncake_kernels as mk
from mooncake_kernels.closeable import Closeable
from mooncake_kernels.errors import FailureKind, InvalidArgument, TransferError
from mooncake_kernels.transfer import Region

from ...rpc import Message
from .endpoint import Endpoint
from .incoming import Call, OfView, Question, Request, Result, places_of
from .messages import (
    MAX_NUMBERS,
    MAX_RANKS,
    MAX_TEXT,
    MAX_WANTS,
    Ask,
    Asking,
    Cancel,
    Chunk,
    Describe,
    Described,
    Ended,
    Grant,
    Release,
    Serving,
    Spare,
    Want,
)
from .sender import check_groups, forms_of
from .settings import Source
from .shards import first_head, sources

logger = logging.getLogger(__name__)

Written = tuple[list[int], list[int]]  # layers of a view, and which of a request's blocks

ASKING_S = 1.0
GRACE_S = 1.0  # after a sender's death, for what the network or this process still delivers
REPLACE_S = 5.0  # after which slots get other memory whose sender does not answer
RETRY_S = 5.0  # if that was not possible

# Memory of slots that were replaced is freed if their sender was out of reach for so long. That is
# safe: its region is closed, so that writes to it are refused. Only if that process was frozen all
# the time, and other memory that peers may write to has the address by then, does a late write
# reach it: in a slot, a chunk that is damaged by it does not match its checksums.
FORGET_S = 600.0


class Receiver(Closeable):
    """Asks sender ranks for requests' blocks, and unpacks them into its own cache.

    Peers write to staging memory only. Cache pages are written by its thread alone, between
    ``receive`` and the return of ``cancel``, or the request's appearance in ``take_results``. A
    staging slot that a sender may still write to is not used again before the sender has said that
    it does not, or its process is gone. Thread-safe.

    Args:
        endpoint: of this rank; not started yet.
        groups: its cache.
        num_heads: KV heads of the model, of each group, as for ``sources``.
        rank, num_ranks: of tensor parallelism.

    Raises:
        InvalidArgument: a group is of an encoder or has a ``token_shard``, or no number of heads.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        groups: mk.CacheGroups,
        *,
        num_heads: Mapping[str, int],
        rank: int = 0,
        num_ranks: int = 1,
    ):
        if set(num_heads) != set(groups):
            raise InvalidArgument(
                f"Receiver: num_heads must be of the groups {sorted(groups)}, "
                f"got {sorted(num_heads)}"
            )
        check_groups("Receiver", groups)
        self._endpoint, self._settings = endpoint, endpoint.settings
        self._groups, self._num_heads = groups, dict(num_heads)
        self._rank, self._num_ranks = rank, num_ranks
        self._first_heads = {
            name: first_head(heads, rank, num_ranks) for name, heads in num_heads.items()
        }
        self._forms = forms_of(groups)
        self._on_gpu = groups.device.type == "cuda"
        num_slots = self._settings.num_slots
        self._slots = [self._new_slot() for _ in range(num_slots)]
        # One for each slot: it keeps the plans of the few buffers it was given last.
        self._packers = [
            mk.GroupsPacker(groups, first_head=self._first_heads) for _ in range(num_slots)
        ]
        self._state = threading.Condition()
        self._numbers = itertools.count(secrets.randbits(62))
        self._requests: dict[str, Request] = {}
        self._calls: dict[tuple[str, int], Call] = {}  # that are under way
        self._fenced: dict[tuple[str, int], Call] = {}  # that may still write to their slots
        self._free = deque(range(num_slots))
        self._wants: deque[Call] = deque()
        self._asked: dict[int, Question] = {}  # by number: whose ranks are not known yet
        self._results: list[Result] = []
        self._chunks: queue.SimpleQueue[tuple[Call, int, bytes] | None] = queue.SimpleQueue()
        self._next_asking_s = 0.0
        self._has_closed = threading.Event()
        self.closed = False
        for kind, handler in (
            (Want, self._take_want), (Chunk, self._take_chunk), (Spare, self._take_spare),
            (Ended, self._take_ended), (Serving, self._take_serving),
            (Described, self._take_described),
        ):  # fmt: skip
            endpoint.handle(kind, handler)
        endpoint.on_tick(self._tick)
        endpoint.on_failure(self._peer_failed)
        self._thread = threading.Thread(target=self._unpack_all, name="handoff unpack", daemon=True)
        self._thread.start()

    # --- of the engine ------------------------------------------------------------------------

    def receive(
        self,
        request_id: str,
        source: Source,
        transfer_id: str,
        digest: bytes,
        block_ids: Mapping[str, Sequence[int]],
        num_tokens: int,
        *,
        receiver_id: str = "",
        first_token: int = 0,
        after: torch.cuda.Event | None = None,
    ) -> None:
        """Have tokens ``first_token`` up to ``num_tokens`` of a prompt sent into these blocks.

        It returns at once; the end is a ``Result``.

        Args:
            request_id: not one that is under way.
            source: the engine that prefills.
            transfer_id: as the sender has offered it, or will.
            digest: of the prompt; see ``Ask``.
            block_ids: the whole block table of each group, -1 where it has no block. Blocks
                before ``first_token`` are not written.
            num_tokens: of the prompt.
            first_token: a multiple of each group's ``tokens_per_block``, of those that need all
                tokens.
            after: on CUDA, an event after which the blocks may be written.
            receiver_id: of this engine, the same in all its ranks; all that give "" count as one.

        Raises:
            InvalidArgument: an argument is not as above.
        """
        op = "receive"
        if set(block_ids) != set(self._groups):
            raise InvalidArgument(
                f"{op}: block_ids must be of the groups {sorted(self._groups)}, "
                f"got {sorted(block_ids)}"
            )
        if not 0 <= first_token < num_tokens:
            raise InvalidArgument(
                f"{op}: first_token must be in [0, {num_tokens}), got {first_token}"
            )
        names = {"transfer_id": transfer_id, "engine_id": source.engine_id}
        for name, text in {**names, "receiver_id": receiver_id}.items():
            if len(text) > MAX_TEXT:
                raise InvalidArgument(
                    f"{op}: {name} must be at most {MAX_TEXT} characters, got {len(text)}"
                )
        if len(source.ranks) > MAX_RANKS:
            raise InvalidArgument(
                f"{op}: source must have at most {MAX_RANKS} ranks, got {len(source.ranks)}"
            )
        if not source.ranks and not source.first_rank:
            raise InvalidArgument(f"{op}: source must have ranks or first_rank, got {source}")
        blocks: dict[str, dict[int, int]] = {}
        for name, places in self._groups.needed(num_tokens).items():
            group, ids = self._groups[name], block_ids[name]
            size = group.tokens_per_block
            if group.kind == "full" and first_token % size:
                raise InvalidArgument(
                    f"{op}: first_token must be a multiple of {size}, got {first_token}"
                )
            places = range(max(places.start, first_token // size), places.stop)
            if places.stop > len(ids):
                raise InvalidArgument(
                    f"{op}: block_ids[{name!r}] must be at least {places.stop}, got {len(ids)}"
                )
            if none := [place for place in places if ids[place] < 0]:
                raise InvalidArgument(
                    f"{op}: block_ids[{name!r}] must have a block at {places.start} up to "
                    f"{places.stop}, got none at {none[0]}"
                )
            blocks[name] = {place: int(ids[place]) for place in places}
        request = Request(
            *(request_id, receiver_id, source, transfer_id, digest, first_token, num_tokens),
            *(blocks, after),
        )
        with self._state:
            if request_id in self._requests:
                raise InvalidArgument(
                    f"{op}: request_id must be of no current request, got {request_id!r}"
                )
            self._requests[request_id] = request
            if self.closed:
                self._fail(request, "the receiver was closed")
            elif source.ranks:
                self._ask(request, source.ranks)
            else:
                self._describe(source.first_rank, request)

    def cancel(self, request_id: str) -> None:
        """End a request: when this returns, its blocks are not written any more.

        It is in ``take_results`` then, if it was under way. Unknown ones are ignored.
        """
        with self._state:
            request = self._requests.get(request_id)
            if request is not None:
                self._fail(request, "it was cancelled here")
                self._state.wait_for(lambda: request.num_unpacking == 0)
                self._close(request)

    def release(self, source: Source, transfer_id: str) -> None:
        """Tell a sending engine that no one will ask for a transfer: it need not wait any longer.

        Of all ranks of the receiving engine one does so.
        """
        message = Release(0, source.engine_id, transfer_id)
        with self._state:
            if source.ranks:
                for name in source.ranks:
                    self._endpoint.send(name, message)
            elif source.first_rank:
                self._describe(source.first_rank, message)

    def take_results(self) -> list[Result]:
        """Return the requests that ended since the last call, each once."""
        with self._state:
            results, self._results = self._results, []
            return results

    @property
    def num_free_slots(self) -> int:
        """Landing slots that no sender may write to, and whose contents are not needed."""
        with self._state:
            return len(self._free)

    def close(self) -> None:
        """End all requests; memory is not written any more. Idempotent."""
        with self._state:
            if self.closed:
                return
            self.closed = True
            self._has_closed.set()
            for request in [*self._requests.values()]:
                self._fail(request, "the receiver was closed")
        self._chunks.put(None)
        self._thread.join()
        for _, region in self._slots:
            try:
                region.close()
            except TimeoutError as error:  # the engine keeps the memory
                logger.warning("hand-off: %s", error)

    # --- messages -----------------------------------------------------------------------------

    def _take_want(self, peer: str, message: Want) -> None:
        with self._state:
            call = self._heard(peer, message.number)
            if call is not None and call.num_wanted < MAX_WANTS:
                if not call.num_wanted and not call.granted:
                    call.moved_s = call.heard_s
                call.num_wanted += 1
                self._wants.append(call)
                self._grant()

    def _take_chunk(self, peer: str, message: Chunk) -> None:
        with self._state:
            call = self._came_back(peer, message.number, message.slot)
            if (peer, message.number) in self._fenced:
                self._give_back(message.slot)
                self._unfence(call, only_if_empty=True)
            else:
                call.num_pending += 1
                self._chunks.put((call, message.slot, message.header))

    def _take_spare(self, peer: str, message: Spare) -> None:
        with self._state:
            call = self._came_back(peer, message.number, message.slot)
            self._give_back(message.slot)
            if (peer, message.number) in self._fenced:
                self._unfence(call, only_if_empty=True)

    def _came_back(self, peer: str, number: int, slot: int) -> Call:
        """Return the call whose sender has said that it does not write to a slot any more."""
        call = self._heard(peer, number) or self._fenced.get((peer, number))
        if call is None or slot not in call.granted:
            raise InvalidArgument(f"handoff: slot {slot} was not granted for this")
        call.granted.discard(slot)
        call.moved_s = time.monotonic()
        return call

    def _take_ended(self, peer: str, message: Ended) -> None:
        with self._state:
            fenced = self._fenced.get((peer, message.number))
            if fenced is not None:
                self._unfence(fenced)
                return
            call = self._calls.get((peer, message.number))
            if call is None or call.has_ended:
                return
            call.has_ended = True
            self._give_back(*call.granted)
            call.granted.clear()
            if message.reason:
                self._fail(call.request, f"{peer} does not send it: {message.reason}")
            else:
                self._check_ended(call)

    def _take_serving(self, peer: str, message: Serving) -> None:
        with self._state:
            for number in message.numbers:
                self._heard(peer, number)
                if (fenced := self._fenced.get((peer, number))) is not None:
                    fenced.lost_s = None

    def _take_described(self, peer: str, message: Described) -> None:
        with self._state:
            question = self._asked.get(message.number)
            if question is None:  # its number is as good as a name, which may be another one here
                return
            del self._asked[message.number]
            what = question.what
            if isinstance(what, Request) and what.is_over:
                if self._rank != 0:
                    return
                what = Release(0, what.source.engine_id, what.transfer_id)  # not asked for yet
            if isinstance(what, Release):
                for rank in message.ranks:
                    self._endpoint.send(rank, what)
            elif what.source.engine_id not in ("", message.engine_id):
                wanted = what.source.engine_id
                self._fail(what, f"the engine at {peer} is {message.engine_id}, not {wanted}")
            else:
                self._ask(what, message.ranks)

    def _peer_failed(self, peer: str, error: TransferError, message: Message | None) -> None:
        """Fail all that a peer is asked for; only what a message is about if it was not sent."""
        with self._state:
            for number, question in [*self._asked.items()]:
                if question.name == peer and (message is None or message.number == number):
                    self._give_up(number, str(error))
            for call in [call for call in self._calls.values() if call.peer == peer]:
                if message is None or message.number == call.number:
                    self._fail(call.request, str(error))
            for call in [call for call in self._fenced.values() if call.peer == peer]:
                if error.kind is FailureKind.GONE:
                    call.gone_s = call.gone_s or time.monotonic()
                elif error.kind in (FailureKind.UNREACHABLE, FailureKind.TIMED_OUT):
                    call.lost_s = call.lost_s or time.monotonic()

    def _tick(self) -> None:
        now = time.monotonic()
        silence_s, lease_s = self._settings.silence_s, self._settings.lease_s
        stall_s = self._settings.stall_s
        with self._state:
            for call in [*self._calls.values()]:
                if now - call.heard_s > silence_s and not call.has_ended:
                    self._fail(call.request, f"{call.peer} was silent for {silence_s:g} s")
                elif not call.num_wanted and not call.granted:
                    continue  # it computes
                elif now - call.moved_s > stall_s and not call.has_ended:
                    what = "used no slot it has" if call.granted else "got no slot: none was free"
                    self._fail(call.request, f"{call.peer} {what} for {stall_s:g} s")
            for number, question in [*self._asked.items()]:
                if now - question.started_s > lease_s:
                    error = f"{question.name} did not name its ranks within {lease_s:g} s"
                    self._give_up(number, error)
            for call in [*self._fenced.values()]:
                is_gone = call.gone_s is not None and now - call.gone_s > GRACE_S
                is_lost = call.lost_s is not None and now - call.lost_s > FORGET_S
                if is_gone or (is_lost and not call.granted):
                    self._unfence(call)
                elif call.granted and now > call.replace_s and self._may_replace:
                    call.replace_s = math.inf  # until it is done
                    threading.Thread(
                        target=self._replace, args=(call,), name="handoff replace", daemon=True
                    ).start()
            if now >= self._next_asking_s:
                self._next_asking_s = now + ASKING_S
                for call in self._fenced.values():
                    self._endpoint.send(call.peer, Cancel(call.number), repeats=True)
                by_peer: dict[str, list[int]] = {}
                for (peer, number), call in self._calls.items():
                    if not call.has_ended:
                        by_peer.setdefault(peer, []).append(number)
                for peer, numbers in by_peer.items():
                    for first in range(0, len(numbers), MAX_NUMBERS):
                        part = numbers[first : first + MAX_NUMBERS]
                        self._endpoint.send(peer, Asking(0, part), repeats=True)

    # --- with the lock held -------------------------------------------------------------------

    @property
    def _may_replace(self) -> bool:
        """Whether memory that is set aside may grow: to what the slots have, at most."""
        num_retired = sum(len(call.retired) for call in self._fenced.values())
        return num_retired < self._settings.num_slots

    def _heard(self, peer: str, number: int) -> Call | None:
        if (call := self._calls.get((peer, number))) is not None:
            call.heard_s = time.monotonic()
        return call

    def _describe(self, name: str, what: "Request | Release") -> None:
        number = next(self._numbers)
        self._asked[number] = Question(name, what, time.monotonic())
        self._endpoint.send(name, Describe(number))

    def _give_up(self, number: int, error: str) -> None:
        what = self._asked.pop(number).what
        if isinstance(what, Request):
            self._fail(what, error)

    def _ask(self, request: Request, ranks: Sequence[str]) -> None:
        """Ask each sender rank that is needed, and release the others."""
        source, num_senders = request.source, len(ranks)
        if not ranks:
            self._fail(request, f"{source.first_rank} has named no ranks")
            return
        try:
            asked = [
                sources(self._num_heads, num_senders, rank, self._num_ranks)
                for rank in range(self._num_ranks)
            ]
        except InvalidArgument as error:
            self._fail(request, str(error))
            return
        for sender in asked[self._rank]:
            call = Call(
                next(self._numbers), ranks[sender], request,
                {
                    (name, index): np.ones((view.num_layers, len(request.blocks[name])), bool)
                    for name, group in self._groups.items()
                    for index, view in enumerate(group.views)
                },
                time.monotonic(),
            )  # fmt: skip
            request.calls.append(call)
            self._calls[call.peer, call.number] = call
            self._endpoint.send(
                call.peer,
                Ask(
                    call.number,
                    engine_id=source.engine_id,
                    transfer_id=request.transfer_id,
                    model=self._settings.model,
                    digest=request.digest,
                    first_token=request.first_token,
                    num_tokens=request.num_tokens,
                    receiver_id=request.receiver_id,
                    num_receivers=sum(sender in of_rank for of_rank in asked),
                    slot_bytes=self._settings.slot_bytes,
                    groups=self._forms,
                ),
            )
        if self._rank == 0:
            for sender in set(range(num_senders)).difference(*asked):
                release = Release(0, source.engine_id, request.transfer_id)
                self._endpoint.send(ranks[sender], release)

    def _grant(self) -> None:
        """Give free slots to those who want some, in turn."""
        while self._free and self._wants:
            call = self._wants.popleft()
            call.num_wanted -= 1
            if self._calls.get((call.peer, call.number)) is not call or call.has_ended:
                continue
            slot = self._free.popleft()
            call.granted.add(slot)
            call.moved_s = time.monotonic()
            memory, _ = self._slots[slot]
            self._endpoint.send(call.peer, Grant(call.number, slot, memory.data_ptr()))

    def _give_back(self, *slots: int) -> None:
        self._free.extend(slots)
        self._grant()

    def _unfence(self, call: Call, *, only_if_empty: bool = False) -> None:
        """Use the slots of a call again, to which its sender does not write any more."""
        if only_if_empty and (call.granted or call.retired):
            return
        self._fenced.pop((call.peer, call.number), None)
        call.retired.clear()
        self._give_back(*call.granted)
        call.granted.clear()

    def _new_slot(self) -> tuple[torch.Tensor, Region]:
        memory = torch.zeros(
            self._settings.slot_bytes, dtype=torch.uint8, device=self._groups.device
        )
        return memory, self._endpoint.engine.register(memory, access="write")

    def _fail(self, request: Request, error: str) -> None:
        """End a request. Its blocks may be being written until ``num_unpacking`` is 0."""
        if not request.is_over:
            request.is_over, request.error = True, error
            for call in request.calls:
                self._leave(call)
        self._close(request)

    def _leave(self, call: Call) -> None:
        """Ask no more of a sender; keep the slots aside that it may write to."""
        if self._calls.pop((call.peer, call.number), None) is None or call.has_ended:
            return
        self._endpoint.send(call.peer, Cancel(call.number))
        if call.num_wanted:
            self._wants = deque(other for other in self._wants if other is not call)
        if call.granted:
            call.replace_s = time.monotonic() + min(REPLACE_S, self._settings.lease_s)
            self._fenced[call.peer, call.number] = call

    def _close(self, request: Request) -> None:
        """Report the end of a request, once its blocks are not written any more."""
        if request.is_over and request.num_unpacking == 0:
            if self._requests.pop(request.request_id, None) is not None:
                self._results.append(Result(request.request_id, request.error))
            self._state.notify_all()

    # --- its threads --------------------------------------------------------------------------

    def _replace(self, call: Call) -> None:
        """Use other memory for the slots of a call whose sender does not answer.

        The old memory takes no write any more once its region is closed. It is not freed before the
        sender has answered, is gone, or was out of reach for long (``FORGET_S``): an address that
        it may still use is given to no other memory. On a thread of its own, and without the lock
        where it may take seconds.
        """
        regions: list[Region] = []
        with self._state:
            slots = [*call.granted]
        for slot in slots:
            try:
                fresh = self._new_slot()
            except Exception:  # as memory that is short: the slot stays as it is
                logger.exception("hand-off: a slot is not replaced yet")
                break
            with self._state:
                is_due = slot in call.granted and self._may_replace and not self.closed
                if is_due:
                    memory, region = self._slots[slot]
                    self._slots[slot] = fresh
                    call.granted.discard(slot)
                    call.retired.append(memory)
                    self._give_back(slot)
            if is_due:
                regions.append(region)
                logger.warning(
                    "hand-off: %s does not answer: %d bytes that it may write to are set aside",
                    call.peer,
                    len(memory),
                )
            else:
                fresh[1].close()
        with self._state:
            call.replace_s = time.monotonic() + RETRY_S
        for region in regions:
            self._close_region(region)

    def _close_region(self, region: Region) -> None:
        """Close a region, however long it is in use; the engine keeps its memory as long."""
        while True:
            try:
                region.close()
                return
            except TimeoutError:  # its sender is stopped in the middle of a copy, on this machine
                if self._has_closed.wait(RETRY_S):
                    return

    def _unpack_all(self) -> None:
        stream = torch.cuda.Stream(self._groups.device) if self._on_gpu else None
        while (chunk := self._chunks.get()) is not None:
            call, slot, data = chunk
            request, error, written = call.request, None, None
            with self._state:
                is_over = request.is_over
                request.num_unpacking += not is_over
            if not is_over:
                try:
                    written = self._unpack(call, slot, data, stream)
                except Exception as failure:  # of this request: the others are served
                    if not isinstance(failure, ValueError):  # our own errors say what is wrong
                        logger.exception("hand-off: %s was not unpacked", request.request_id)
                    error = f"a chunk of {call.peer} is wrong: {failure}"
            with self._state:
                self._give_back(slot)
                call.num_pending -= 1
                if is_over:
                    continue
                request.num_unpacking -= 1
                if error is not None:
                    self._fail(request, error)
                elif written is not None and not request.is_over:
                    self._wrote(call, written)
                    self._check_ended(call)
                self._close(request)

    def _unpack(
        self, call: Call, slot: int, data: bytes, stream: torch.cuda.Stream | None
    ) -> dict[OfView, Written]:
        """Unpack a chunk; returns which layers of which blocks are there now."""
        header = mk.GroupsHeader.from_bytes(data)
        packer, (staging, _) = self._packers[slot], self._slots[slot]
        is_empty = any(group.packed.num_blocks == 0 for group in header.groups)
        if is_empty or header.num_bytes > self._settings.slot_bytes:
            raise InvalidArgument(
                f"a chunk must have blocks, of at most {self._settings.slot_bytes} bytes, "
                f"got {header.num_bytes}"
            )
        ids: dict[str, list[int]] = {}
        written: dict[OfView, Written] = {}
        for packed in header.groups:
            places = places_of(self._groups, packed, call.request.num_tokens)
            blocks = call.request.blocks[packed.name]
            ids[packed.name] = [blocks.get(place, -1) for place in places]
            first = next(iter(blocks), 0)
            rows = [place - first for place in places if place in blocks]
            for index, view in enumerate(packed.packed.views):
                key, heads = (packed.name, index), (view.first_head, view.heads)
                if call.heads.setdefault(key, heads) != heads:
                    raise InvalidArgument("chunks must have the same heads")
                if (missing := call.missing.get(key)) is not None:
                    written[key] = [n for n in view.layers if n < len(missing)], rows
        if stream is None:
            packer.unpack(header, staging, ids)
        else:
            with torch.cuda.stream(stream):
                if call.request.after is not None:
                    stream.wait_event(call.request.after)
                packer.unpack(header, staging, ids)
                packer.check()  # also waits: the slot is given back, and the request may go on
        return written

    def _wrote(self, call: Call, written: Mapping[OfView, Written]) -> None:
        """Note what has come; if that is all, the request is over."""
        for view, (layers, rows) in written.items():
            call.missing[view][np.ix_(layers, rows)] = False
        if not call.is_complete:
            return
        self._leave_complete(call)
        request = call.request
        if all(other.is_complete for other in request.calls):
            if lacking := request.lacking(self._groups, self._first_heads):
                self._fail(request, f"group {lacking} came without some of its heads")
            else:
                request.is_over = True

    def _check_ended(self, call: Call) -> None:
        """Fail a request if a sender has sent all that it will, and something is missing."""
        if call.has_ended and call.num_pending == 0 and not call.is_complete:
            self._fail(call.request, f"{call.peer} has sent its part, and blocks are missing")

    def _leave_complete(self, call: Call) -> None:
        """Forget a call whose sender has written all of it."""
        if call.granted:  # it has asked for more slots than it has used
            self._leave(call)
        else:
            self._calls.pop((call.peer, call.number), None)
