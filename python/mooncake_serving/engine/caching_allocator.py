"""Allocation of blocks that keeps what full ones contain, until their memory is needed."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mooncake_kernels as mk

from ..arguments import as_integer
from .arguments import as_positive
from .block_allocator import BlockAllocator
from .errors import OutOfBlocks


@dataclass(frozen=True, slots=True)
class KeptBlocks:
    """Blocks that later prompts can begin with from now on, one behind the other.

    Attributes:
        names: ``mk.block_hashes`` of them.
        block_ids: of them.
        parent: name of the block before the first one; None: it begins a prompt.
        token_ids: of all of them.
    """

    names: tuple[int, ...]
    block_ids: tuple[int, ...]
    parent: int | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DroppedBlocks:
    """Blocks whose memory was needed, by their names."""

    names: tuple[int, ...]


OnChange = Callable[[KeptBlocks | DroppedBlocks], None]


@dataclass(frozen=True, slots=True)
class _Kept:
    block_id: int
    parent: int | None
    token_ids: tuple[int, ...]  # compared before it is used: a hash alone proves nothing


class CachingAllocator(BlockAllocator):
    """Hand out block ids, and keep full blocks by name: the least recently used are given up first.

    A kept block counts as free while no one else holds it. ``allocate_for`` is not made for Ctrl-C:
    blocks that it was about to hand out may stay held.

    Args:
        num_blocks: see ``BlockAllocator``.
        block_size: tokens of a block.

    Attributes:
        on_change: called with what was kept and dropped, in order; None: no one is told.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks)
        self._block_size = as_positive("CachingAllocator", "block_size", block_size)
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # by name, least recently used first
        self._approximate: set[int] = set()  # blocks, until they are allocated again
        self.on_change: OnChange | None = None

    @property
    def num_free(self) -> int:
        """Count the blocks that can be allocated now, kept ones among them."""
        return len(self._free) + sum(1 for kept in self._kept.values() if self._is_idle(kept))

    @property
    def num_kept(self) -> int:
        """Count the blocks that later prompts can begin with."""
        return len(self._kept)

    def keeps(self, name: int) -> bool:
        """Tell whether later prompts can begin with the block of a name."""
        return name in self._kept

    def allocate(self, num_blocks: int, into: list[int] | None = None) -> list[int]:
        """Take blocks as ``BlockAllocator`` does; kept ones are given up if need be."""
        num_blocks = as_integer("allocate", "num_blocks", num_blocks)
        if len(self._free) < num_blocks <= self.num_free:
            self._give_up(num_blocks - len(self._free))
        block_ids = super().allocate(num_blocks, into)
        self._approximate.difference_update(block_ids)
        return block_ids

    def allocate_for(self, token_ids: Sequence[int], num_blocks: int, into: list[int]) -> int:
        """Take the blocks of a request, of which the first may be kept ones of its beginning.

        Args:
            token_ids: its prompt, of which at least the last token is left to compute.
            num_blocks: at least enough for it.
            into: gets the blocks, in order.

        Returns:
            How many tokens at the beginning have their keys and values there.

        Raises:
            OutOfBlocks: too few are free; nothing has changed.
        """
        names = self._find(token_ids)
        hits = [self._kept[name].block_id for name in names]
        self.share(hits)  # so that none of them is given up for the others
        try:
            rest = self.allocate(num_blocks - len(hits))
        except OutOfBlocks:
            self.free(hits)
            raise
        self._touch(names)
        into[:] = hits + rest
        return len(hits) * self._block_size

    def keep(self, token_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        """Keep the full blocks of a sequence for those that begin alike, up to one that is marked.

        Args:
            token_ids: whose keys and values are in the blocks, and will not change.
            block_ids: allocated ones, in order, at least enough.
        """
        size, marked = self._block_size, self._approximate
        num_exact = next((i for i, one in enumerate(block_ids) if one in marked), len(block_ids))
        names = mk.block_hashes(token_ids[: num_exact * size], size).tolist()
        first = next((i for i, name in enumerate(names) if name not in self._kept), len(names))
        new = [i for i in range(first, len(names)) if names[i] not in self._kept]
        self.share(block_ids[i] for i in new)
        for i in new:
            tokens = tuple(token_ids[i * size : (i + 1) * size])
            parent = names[i - 1] if i else None
            self._kept[names[i]] = _Kept(block_ids[i], parent, tokens)
        self._touch(names)
        if new and self.on_change is not None:  # from the first that is new on: a chain
            tokens = tuple(token_ids[first * size : len(names) * size])
            parent = names[first - 1] if first else None
            blocks = tuple(self._kept[name].block_id for name in names[first:])
            self.on_change(KeptBlocks(tuple(names[first:]), blocks, parent, tokens))

    def mark_approximate(self, block_ids: Sequence[int]) -> None:
        """See ``BlockAllocator``."""
        self._approximate.update(block_ids)

    def _find(self, token_ids: Sequence[int]) -> list[int]:
        """Return the names of the kept blocks that a prompt begins with."""
        size, found, parent = self._block_size, list[int](), None
        for i, name in enumerate(mk.block_hashes(token_ids[:-1], size).tolist()):
            kept = self._kept.get(name)
            tokens = tuple(token_ids[i * size : (i + 1) * size])
            if kept is None or (kept.parent, kept.token_ids) != (parent, tokens):
                break
            found.append(name)
            parent = name
        return found

    def _touch(self, names: Sequence[int]) -> None:
        """Make blocks the most recently used, the first of all: it is useless to keep a later one
        without those before it.
        """
        for name in reversed(names):
            self._kept.move_to_end(name)

    def _give_up(self, num_blocks: int) -> None:
        names = [name for name, kept in self._kept.items() if self._is_idle(kept)][:num_blocks]
        self.free([self._kept.pop(name).block_id for name in names])
        if self.on_change is not None:
            self.on_change(DroppedBlocks(tuple(names)))

    def _is_idle(self, kept: _Kept) -> bool:
        return self._num_holders[kept.block_id] == 1
