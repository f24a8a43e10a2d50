"""The scheduler's side: what the store has of a prompt, and what each step loads and saves."""

import logging
import secrets
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

import mooncake_kernels as mk
from mooncake_kernels.kv import CacheGroup, CacheGroups

from ..tier_store import TierStore
from .block_events import BlockEvents, DescribedBlocks, RemovedBlocks, StoredBlocks
from .steps import NULL_BLOCK, Blocks, GroupForm, Load, Report, Save, Step, object_names

log = logging.getLogger("mooncake_serving.connectors.vllm")

EPOCH_BYTES = 16
# Shares of the engine's blocks that may wait to be copied out: a request that runs is saved later
# if there are more, one that finishes is not saved.
MAX_WAITING, MAX_WAITING_AT_END = 1 / 4, 1 / 2


@dataclass
class _Tracked:
    request: Any
    hashes: Sequence[bytes]  # of all full blocks of tokens so far: it grows
    num_saved: list[int]  # by group: blocks at the head that were saved, or need not be


@dataclass
class _Waiting:
    num_workers: int  # that have not copied them yet
    blocks: list[Blocks]


class StoreScheduler:
    """Decides, without vLLM, what an engine loads from the store and saves into it.

    A request whose prefix the store has waits outside the batch until all workers have loaded it;
    vLLM caches its blocks only then. So a failed load concerns that request alone: nothing was
    computed on its blocks, and none of them was shared. It is looked up again, up to the first
    block that did not come; each failure leaves fewer tokens to load, so that this ends.

    Blocks that a step fills are saved after it. A reference of vLLM's own block pool keeps them
    until every worker has copied them out, whether their request finishes, is preempted, or its
    sliding window moves on.

    Args:
        store: where blocks are looked up.
        namespace: of the store, for the workers.
        groups: of the engine's cache.
        tokens_per_hash: of the hashes of a request; it divides all blocks.
        num_blocks: of the engine's cache.
        num_shards: parts of a block that the store has as objects.
        num_workers: that report.
        loads, saves: whether this engine does.
        events: whether ``take_events`` tells which blocks the store has.
    """

    def __init__(
        self,
        store: TierStore,
        namespace: str,
        groups: Sequence[GroupForm],
        *,
        tokens_per_hash: int,
        num_blocks: int,
        num_shards: int = 1,
        num_workers: int = 1,
        loads: bool = True,
        saves: bool = True,
        events: bool = False,
    ):
        self._store, self._namespace = store, namespace
        no_bytes = mk.KVView(torch.empty((1, 1), dtype=torch.uint8), "block dim")
        self._groups = [
            CacheGroup(
                str(i),
                no_bytes,
                form.kind,
                window=form.window,
                tokens_per_block=form.tokens_per_block,
            )
            for i, form in enumerate(groups)
        ]
        self._cache = CacheGroups(*self._groups)
        self._tokens_per_hash = tokens_per_hash
        self._num_blocks = num_blocks
        self._shards, self._num_workers = range(num_shards), num_workers
        self._loads, self._saves = loads, saves
        self._epoch = b""
        self._requests: dict[str, _Tracked] = {}
        self._bases: dict[str, int] = {}  # tokens that the engine has, of requests looked up
        self._usable: dict[str, int] = {}  # tokens, of requests whose load failed
        self._loading: dict[str, int] = {}  # tokens that the engine had before
        self._awaited: set[str] = set()  # requests that another engine prefills
        self._failing: dict[str, int] = {}  # tokens that came, of loads that are not over
        self._to_load: list[Load] = []
        self._to_save: list[Blocks] = []
        self._pool: Any = None
        self._num_saves = 0
        self._waiting: dict[int, _Waiting] = {}  # by number of a save
        self._num_waiting = 0  # blocks
        self._num_unsaved = 0
        self._events = BlockEvents(store, num_shards) if events else None
        # A lookup that asks other hosts would hold up all requests.
        self._threads = None if store.is_local else ThreadPoolExecutor(1, "mk-lookup")
        self._lookups: dict[str, tuple[Any, Future[int]]] = {}

    def bind_block_pool(self, pool: Any) -> None:
        """Set vLLM's ``BlockPool``, whose references keep blocks."""
        self._pool = pool

    @property
    def has_waiting(self) -> bool:
        """Whether blocks wait to be copied out, or to be known to be saved, for an event."""
        is_unreported = self._events is not None and self._events.has_saving
        return bool(self._to_save or self._waiting) or is_unreported

    def matched(self, request: Any, num_computed: int) -> tuple[int | None, bool]:
        """Count the tokens that the store has after those that the engine has.

        Returns:
            Tokens, None while another host is asked; and whether they are loaded asynchronously.
        """
        name, size = request.request_id, self._cache.tokens_per_hit
        self._bases.pop(name, None)
        if not self._loads or num_computed % size:
            return 0, False
        # The last token is always computed: its output is needed.
        most = min(request.num_tokens - 1, len(request.block_hashes) * self._tokens_per_hash)
        end = min(most, self._usable.get(name, most)) // size * size
        if end <= num_computed:
            return 0, False
        hit = self._look_up(name, request.block_hashes, num_computed, end)
        if hit is None:
            return None, False
        if hit <= num_computed:
            return 0, False
        self._bases[name] = num_computed
        return hit - num_computed, True

    def is_loading(self, name: str) -> bool:
        """Whether vLLM waits for a load of a request, also if the request is over."""
        return name in self._loading

    def allocated(
        self,
        request: Any,
        ids: Sequence[Sequence[int]],
        num_external: int,
        *,
        is_awaited: bool = False,
    ) -> None:
        """Track the request, and load what was found for it.

        Args:
            request: of vLLM.
            ids: its block table of each group.
            num_external: tokens to load; 0: none.
            is_awaited: whether another engine sends its blocks, which have nothing before it is
                reported as received.
        """
        name = request.request_id
        if is_awaited:
            self._awaited.add(name)
        base = self._bases.pop(name, None)
        tracked = self._requests.setdefault(
            name, _Tracked(request, request.block_hashes, [0] * len(self._groups))
        )
        if num_external <= 0:
            return
        assert base is not None, "vLLM loads only what was found"
        hit = base + num_external
        loaded = []
        for number, group in enumerate(self._groups):
            first, table = base // group.tokens_per_block, ids[number]
            places = [place for place in group.needed(hit) if place >= first]
            assert all(table[place] != NULL_BLOCK for place in places), "vLLM has them allocated"
            loaded.append(self._blocks(tracked, number, places, table))
            tracked.num_saved[number] = hit // group.tokens_per_block
        self._to_load.append(Load(name, loaded))
        if self._events is not None:
            self._events.begin_load(name, [self._described(tracked, one) for one in loaded])
        self._loading[name] = base

    def step(self, output: Any) -> Step:
        """Return what a step loads and saves.

        Args:
            output: a ``SchedulerOutput``.
        """
        for new in output.scheduled_new_reqs:
            self._fill(output, new.req_id, new.num_computed_tokens)
        cached = output.scheduled_cached_reqs
        for name, done in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._fill(output, name, done)
        self._save_states(output.kv_connector_block_state.boundary_state_offloads)
        save = None
        if self._to_save:
            save = Save(self._num_saves, self._to_save, self._events is not None)
            if self._events is not None:
                self._events.begin_save(save.number)
            self._waiting[save.number] = _Waiting(self._num_workers, self._to_save)
            self._num_saves += 1
            self._to_save = []
        loads, self._to_load = self._to_load, []
        return Step(self._namespace, self._epoch, loads, save)

    def finished(self, request: Any, ids: Sequence[Sequence[int]]) -> None:
        """Forget a request, and save what was filled and is not saved yet: with asynchronous
        scheduling, vLLM hashes a block a step after it was filled.
        """
        name = request.request_id
        tracked = self._requests.pop(name, None)
        self._bases.pop(name, None)
        self._usable.pop(name, None)
        if (lookup := self._lookups.pop(name, None)) is not None:
            lookup[1].cancel()
        # vLLM counts tokens as computed that are only on their way.
        if tracked is not None and name not in self._loading and name not in self._awaited:
            most = int(MAX_WAITING_AT_END * self._num_blocks)
            self._num_unsaved += self._save(tracked, ids, request.num_computed_tokens, most)

    def output(self, report: Report | None, received: Sequence[str], failed: Sequence[str]) -> None:
        """Take the workers' reports.

        Args:
            report: of this step, all workers'; None: nothing.
            received: requests whose load is over in all workers.
            failed: those of them whose load failed in any.
        """
        report = report or Report()
        for number, count in report.copied.items():
            waiting = self._waiting[number]
            waiting.num_workers -= count
            if waiting.num_workers == 0:
                self._release(self._waiting.pop(number).blocks)
        for number, stored in report.stored.items():
            if self._events is not None:
                self._events.end_save(number, stored)
        for name, tokens in report.usable.items():
            self._failing[name] = min(tokens, self._failing.get(name, tokens))
        self._awaited.difference_update(received)
        for name in received:
            base = self._loading.pop(name, None)
            usable = self._failing.pop(name, 0)
            if self._events is not None:
                self._events.end_load(name, has_failed=name in failed)
            if base is None or name not in failed or name not in self._requests:
                continue
            self._usable[name] = usable
            self._requests[name].num_saved = [base // g.tokens_per_block for g in self._groups]

    def reset(self) -> bool:
        """Neither load nor save any more what any engine has in the store now.

        Returns:
            Whether nothing of it is being loaded.
        """
        self._epoch = secrets.token_bytes(EPOCH_BYTES)
        self._requests.clear()
        self._bases.clear()
        self._usable.clear()
        self._lookups.clear()
        self._release(self._to_save)
        self._to_save = []
        if self._events is not None:
            self._events.reset(self._epoch)
        return not self._loading

    def take_events(self) -> list[StoredBlocks | RemovedBlocks]:
        """Return which blocks have come to the store and gone since the last call, see
        ``BlockEvents``.
        """
        return [] if self._events is None else self._events.take()

    def counts(self) -> dict[str, Any]:
        """Return what was counted since the last call, see ``stats``."""
        num_unsaved, self._num_unsaved = self._num_unsaved, 0
        return {"unsaved_blocks": num_unsaved} if num_unsaved else {}

    def close(self) -> None:
        """End the thread of lookups, and the events."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        if self._events is not None:
            self._events.close()

    # --- lookups --------------------------------------------------------------------------------

    def _look_up(self, name: str, hashes: Sequence[bytes], first: int, end: int) -> int | None:
        names = [
            object_names(self._epoch, i, self._hashes(hashes, i, first, end), self._shards)
            for i in range(len(self._groups))
        ]
        if self._threads is None:
            return self._longest(names, first, end)
        query = (first, end, self._epoch)
        if (known := self._lookups.pop(name, None)) is not None and known[0] == query:
            if known[1].done():
                return known[1].result()
            self._lookups[name] = known
            return None
        self._lookups[name] = query, self._threads.submit(self._longest, names, first, end)
        return None

    def _longest(self, names: Sequence[Sequence[bytes]], first: int, end: int) -> int:
        """Return the tokens of the longest prefix that can be had, given ``first`` of them."""
        found: dict[str, Sequence[bool]] = {}
        num_shards = len(self._shards)
        # First those that need all blocks, with one call each: they limit how far others matter.
        for i in sorted(range(len(names)), key=lambda i: self._groups[i].kind != "full"):
            group = self._groups[i]
            size, known = group.tokens_per_block, first // group.tokens_per_block
            wanted = names[i][: (end // size - known) * num_shards]
            if group.kind == "full":
                num_found = self._store.match_prefix(wanted) // num_shards
                found[group.name] = [True] * (known + num_found)
                end = first + num_found * size
            else:
                exists = self._store.exists_each(wanted).reshape(-1, num_shards)
                found[group.name] = [True] * known + [bool(parts.all()) for parts in exists]
            if end <= first:
                return first
        return self._cache.longest_hit(found)

    def _hashes(self, hashes: Sequence[bytes], group: int, first: int, end: int) -> list[bytes]:
        """The hashes of a group's blocks between two tokens."""
        size = self._groups[group].tokens_per_block
        step = size // self._tokens_per_hash
        return [hashes[(i + 1) * step - 1] for i in range(first // size, end // size)]

    # --- saves ----------------------------------------------------------------------------------

    def _fill(self, output: Any, name: str, num_computed: int) -> None:
        """Save the blocks of a request that this step makes full, and once those that the engine
        had: the store may have lost them, and without them no one finds what follows.
        """
        tracked = self._requests.get(name)
        if tracked is None or not self._saves:
            return
        num_tokens = num_computed + output.num_scheduled_tokens[name]
        if not any(
            self._num_full(tracked, i, num_tokens) > saved
            for i, saved in enumerate(tracked.num_saved)
            if self._groups[i].kind != "state"
        ):
            return
        ids = output.kv_connector_block_state.get_block_ids(name)
        self._save(tracked, ids, num_tokens, int(MAX_WAITING * self._num_blocks))

    def _num_full(self, tracked: _Tracked, group: int, num_tokens: int) -> int:
        # Tokens of a draft are computed, and not hashed.
        tokens = min(num_tokens, len(tracked.hashes) * self._tokens_per_hash)
        return tokens // self._groups[group].tokens_per_block

    def _save(
        self, tracked: _Tracked, ids: Sequence[Sequence[int]], num_tokens: int, most: int
    ) -> int:
        """Save the full blocks of a request, as long as no more than ``most`` wait.

        Returns:
            Blocks that would be more.
        """
        if not self._saves:
            return 0
        num_unsaved = 0
        for i, group in enumerate(self._groups):
            if group.kind == "state":  # a later step goes on in the same block
                continue
            end = min(self._num_full(tracked, i, num_tokens), len(ids[i]))
            first = tracked.num_saved[i]
            here = min(end, first + max(most - self._num_waiting, 0))
            num_unsaved += max(end - max(first, here), 0)
            end = here
            places = [place for place in range(first, end) if ids[i][place] != NULL_BLOCK]
            tracked.num_saved[i] = max(first, end)
            if places:
                self._keep(tracked, self._blocks(tracked, i, places, ids[i]))
        return num_unsaved

    def _save_states(self, offered: Mapping[str, Sequence[tuple[int, int, int]]]) -> None:
        """Save states of recurrent layers. vLLM says which block has one, and after how many
        tokens: what else is in a block table, later steps go on to change.
        """
        for name, states in offered.items():
            tracked = self._requests.get(name)
            if tracked is None or not self._saves:
                continue
            for group, block, num_tokens in states:
                size = self._groups[group].tokens_per_block
                is_hashed = num_tokens <= len(tracked.hashes) * self._tokens_per_hash
                if block == NULL_BLOCK or num_tokens % size or not is_hashed:
                    continue
                if self._num_waiting >= MAX_WAITING_AT_END * self._num_blocks:
                    self._num_unsaved += 1
                    continue
                place = num_tokens // size - 1
                hashes = self._hashes(tracked.hashes, group, num_tokens - size, num_tokens)
                self._keep(tracked, Blocks(group, [place], [block], hashes))

    def _keep(self, tracked: _Tracked, blocks: Blocks) -> None:
        """Save blocks with this step, and keep them until they are copied out."""
        self._to_save.append(blocks)
        if self._events is not None:
            self._events.will_save(self._described(tracked, blocks))
        self._num_waiting += len(blocks.ids)
        if self._pool is not None:
            self._pool.touch([self._pool.blocks[block] for block in blocks.ids])

    def _release(self, saved: Sequence[Blocks]) -> None:
        for blocks in saved:
            self._num_waiting -= len(blocks.ids)
            if self._pool is not None:  # the tail is the first to be evicted
                self._pool.free_blocks([self._pool.blocks[i] for i in reversed(blocks.ids)])

    def _blocks(
        self, tracked: _Tracked, group: int, places: list[int], table: Sequence[int]
    ) -> Blocks:
        step = self._groups[group].tokens_per_block // self._tokens_per_hash
        hashes = [tracked.hashes[(place + 1) * step - 1] for place in places]
        return Blocks(group, places, [table[place] for place in places], hashes)

    def _described(self, tracked: _Tracked, blocks: Blocks) -> DescribedBlocks:
        """Add what an event says of blocks: later the request may be changed."""
        size = self._groups[blocks.group].tokens_per_block
        step, tokens = size // self._tokens_per_hash, tracked.request.all_token_ids
        return DescribedBlocks(
            tracked.request,
            blocks,
            [tracked.hashes[place * step - 1] if place else None for place in blocks.places],
            [list(tokens[place * size : (place + 1) * size]) for place in blocks.places],
        )
