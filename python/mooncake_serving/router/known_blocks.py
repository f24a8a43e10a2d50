"""Which blocks each engine holds: what its events say, and what was sent to it since."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_serving.conductor import Conductor
from mooncake_serving.store.events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    EventBatch,
)

from .block_names import block_names

DEFAULT_MEDIUM = "GPU"


@dataclass(slots=True)
class _Block:
    """A block of an engine, which may be several of ours.

    Attributes:
        names: ours, a chain.
        parent: the engine's hash of the block before it.
        media: where the engine has it; none: nowhere any more, as far as is known.
    """

    names: tuple[int, ...]
    parent: BlockHash | None
    media: set[str]


class KnownBlocks:
    """The blocks of one engine, written to the conductor's index.

    Events are of one engine, in their order, by one thread; ``assume`` may be called by another.

    What was sent to an engine counts as held before the engine says so: the ``max_assumed`` blocks
    that were sent last. For an engine without events that is all there is to know. What is still to
    be computed is ``withdrawn`` if that will not take place.

    Attributes:
        num_held: blocks of the engine that its events have told, and not withdrawn.
        num_batches: of events that were applied.
        num_gaps: times that events were lost, or the engine was restarted.
        num_unnamed: blocks of events that cannot be named: their tokens are not told, the block
            before them is not known, or blocks of another size do not fit into them.
    """

    def __init__(self, conductor: Conductor, instance: int, block_size: int, max_assumed: int):
        self._conductor, self._instance, self._block_size = conductor, instance, block_size
        self.max_assumed = max_assumed
        self._assumed: OrderedDict[int, None] = OrderedDict()
        self._uncomputed: set[int] = set()  # of these, until a prefill with them is over
        self._blocks: dict[BlockHash, _Block] = {}
        # Of each name: blocks that are held. An engine's blocks that differ may begin alike.
        self._num_holding = Counter[int]()
        self.num_held = self.num_batches = self.num_gaps = self.num_unnamed = 0

    def assume(self, names: Sequence[int], num_held: int) -> None:
        """Record that the engine will hold the blocks of a prompt that it was sent.

        Args:
            names: of the prompt's blocks.
            num_held: how many of them it holds already.
        """
        assumed, forgotten = self._assumed, list[int]()
        with self._conductor.lock:
            self._uncomputed.update(names[num_held:])
            for position, name in enumerate(names):
                if position >= num_held or name in assumed:
                    assumed[name] = None
                    assumed.move_to_end(name)
            while len(assumed) > self.max_assumed:
                forgotten.append(assumed.popitem(last=False)[0])
            self._uncomputed.difference_update(forgotten)
            self._conductor.index.remove(self._instance, forgotten)

    def computed(self, names: Sequence[int]) -> None:
        """Record that a prompt of these blocks was computed."""
        with self._conductor.lock:
            self._uncomputed.difference_update(names)

    def withdraw(self, names: Sequence[int]) -> None:
        """Record that no prefill under way has these blocks any more."""
        with self._conductor.lock:
            gone = [name for name in names if name in self._uncomputed]
            self._uncomputed.difference_update(gone)
            for name in gone:
                self._assumed.pop(name, None)
            self._conductor.index.remove(self._instance, gone)

    def forget(self) -> None:
        """Record that the engine may hold nothing: it is down, or was restarted."""
        with self._conductor.lock:
            self._assumed.clear()
            self._uncomputed.clear()
            # Names stay true whoever holds the block; those that nobody has used since go.
            self._blocks = {key: block for key, block in self._blocks.items() if block.media}
            for block in self._blocks.values():
                block.media = set()
            self._num_holding.clear()
            self.num_held = 0
            self._conductor.index.clear(self._instance)

    def apply(self, batch: EventBatch) -> None:
        """Apply events of the engine."""
        self.num_batches += 1
        if batch.is_after_gap:
            self.num_gaps += 1
            self.forget()
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._stored(event)
            elif isinstance(event, BlockRemoved):
                self._removed(event)
            elif isinstance(event, AllBlocksCleared):
                self.forget()

    def _stored(self, event: BlockStored) -> None:
        size, count = event.block_size, len(event.block_hashes)
        before = event.parent_block_hash
        parent = None if before is None else self._blocks.get(before)
        is_known = before is None or parent is not None
        fits = size > 0 and size % self._block_size == 0 and len(event.token_ids) == size * count
        if not (is_known and fits and count):
            self.num_unnamed += count
            return
        adapter = event.lora_name or ("" if event.lora_id is None else str(event.lora_id))
        try:
            names = block_names(
                event.token_ids,
                self._block_size,
                adapter=adapter,
                parent=parent.names[-1] if parent else None,
            )
        except ValueError:  # they are no tokens
            self.num_unnamed += count
            return
        each, medium = size // self._block_size, _medium(event)
        with self._conductor.lock:
            added = self._ancestors(before, medium)
            for position, key in enumerate(event.block_hashes):
                own = names[position * each : (position + 1) * each]
                block = self._blocks.setdefault(key, _Block(own, before, set()))
                self._put(block, medium)
                before = key
            added.extend(names)
            self._conductor.index.add(self._instance, added)
            self._uncomputed.difference_update(added)
            for name in added:
                self._assumed.pop(name, None)

    def _ancestors(self, key: BlockHash | None, medium: str) -> list[int]:
        """Names of the blocks before a new one: an engine that extends them holds them, too.

        They are held already, unless their own event was lost.
        """
        lost: list[_Block] = []
        while key is not None and (block := self._blocks.get(key)) and not block.media:
            self._put(block, medium)
            lost.append(block)
            key = block.parent
        return [name for block in reversed(lost) for name in block.names]

    def _put(self, block: _Block, medium: str) -> None:
        if not block.media:
            self.num_held += 1
            self._num_holding.update(block.names)
        block.media.add(medium)

    def _removed(self, event: BlockRemoved) -> None:
        gone: list[int] = []
        with self._conductor.lock:
            for key in event.block_hashes:
                block = self._blocks.get(key)
                if block is None or not block.media:
                    continue
                block.media.discard(_medium(event))
                if event.medium is None:
                    block.media.clear()
                if not block.media:
                    self.num_held -= 1
                    del self._blocks[key]
                    self._num_holding.subtract(block.names)
                    gone.extend(name for name in block.names if not self._num_holding[name])
            for name in gone:
                del self._num_holding[name]
            self._conductor.index.remove(self._instance, gone)


def _medium(event: BlockStored | BlockRemoved) -> str:
    return event.medium or DEFAULT_MEDIUM
