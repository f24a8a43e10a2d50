"""What a receiver knows of the requests that it receives."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.kv.groups_copy import PackedGroup

from .messages import Release
from .settings import Source

OfView = tuple[str, int]  # a group, and the place of one of its views
Heads = tuple[int, int]  # the first one in the model, and how many


@dataclass(frozen=True)
class Result:
    """How a request ended.

    Attributes:
        request_id: of the request.
        error: why it has not come; None: all of it is in its blocks.
    """

    request_id: str
    error: str | None


@dataclass(eq=False)
class Request:
    """What is received into one request's blocks."""

    request_id: str
    receiver_id: str
    source: Source
    transfer_id: str
    digest: bytes
    first_token: int
    num_tokens: int
    blocks: dict[str, dict[int, int]]  # by group: place in the block table -> id
    after: torch.cuda.Event | None
    calls: list["Call"] = field(default_factory=list)
    num_unpacking: int = 0
    is_over: bool = False
    error: str | None = None

    def lacking(self, groups: mk.CacheGroups, first_heads: Mapping[str, int]) -> str | None:
        """Return a group of which not all heads of a rank have come.

        Args:
            groups: the rank's cache.
            first_heads: of the rank in the model, of each group.
        """
        for name, group in groups.items():
            if not self.blocks[name]:
                continue
            for index, view in enumerate(group.views):
                came: set[int] = set()
                for call in self.calls:
                    head, count = call.heads.get((name, index), (0, 0))
                    came.update(range(head, head + count))
                first = first_heads[name] if view.has_heads else 0
                if not came.issuperset(range(first, first + view.num_heads)):
                    return name
        return None


@dataclass(eq=False)
class Call:
    """What one sender rank is asked for a request."""

    number: int
    peer: str
    request: Request
    missing: dict[OfView, np.ndarray]  # [layer, block] bool: what was not written yet
    heard_s: float
    num_wanted: int = 0  # slots that it waits for
    moved_s: float = 0.0  # when it last got a slot or a chunk, or began to wait for one
    granted: set[int] = field(default_factory=set)  # slots that it may write to
    heads: dict[OfView, Heads] = field(default_factory=dict)  # that come
    num_pending: int = 0  # chunks that came, and are not unpacked yet
    has_ended: bool = False  # on the sender's side
    replace_s: float = 0.0  # when they get other memory
    gone_s: float | None = None  # when its process turned out to be gone
    lost_s: float | None = None  # since when it is out of reach
    retired: list[torch.Tensor] = field(default_factory=list)  # slots' memory, replaced since

    @property
    def is_complete(self) -> bool:
        return not any(missing.any() for missing in self.missing.values())


@dataclass(eq=False)
class Question:
    """A sending engine's first rank was asked for the others: what is to be sent to them."""

    name: str
    what: Request | Release
    started_s: float


def places_of(groups: mk.CacheGroups, packed: PackedGroup, num_tokens: int) -> range:
    """Return the places in a receiver's block table of a chunk's records.

    Args:
        groups: the receiver's cache.
        packed: of the chunk.
        num_tokens: of the prompt.

    Raises:
        InvalidArgument: they are not whole blocks here, with all tokens.
    """
    group = groups.get(packed.name)
    if group is None or not packed.packed.has_checksums:
        raise InvalidArgument(
            f"a chunk must have checksums, and of the groups {sorted(groups)}, got {packed.name!r}"
        )
    if packed.token_shard.num_ranks > 1:
        shard = packed.token_shard[:]
        raise InvalidArgument(f"a chunk must have all tokens, got token_shard {shard}")
    size = group.tokens_per_block
    first = packed.first_block * packed.tokens_per_block
    stop = first + packed.packed.num_blocks * packed.tokens_per_block
    if first % size or (stop % size and stop < num_tokens):
        raise InvalidArgument(
            f"a chunk must begin and end with a block of {size} tokens, got {first} to {stop}"
        )
    return range(first // size, -(-stop // size))
