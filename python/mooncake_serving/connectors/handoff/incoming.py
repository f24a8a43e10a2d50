"""What a receiver knows of the requests that it receives."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

import mooncake_kernels as mk

from .messages import Release
from .settings import Source

Part = tuple[tuple[int, ...], int, int]  # layers of the model, first head, number of heads


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
        """Return a group of which not all layers and heads of a rank have come.

        Args:
            groups: the rank's cache.
            first_heads: of the rank in the model, of each group.
        """
        for name, group in groups.items():
            if not self.blocks[name]:
                continue
            for index, view in enumerate(group.views):
                came: set[tuple[int, int]] = set()
                for call in self.calls:
                    if (part := call.parts.get((name, index))) is not None:
                        layers, head, count = part
                        came.update(itertools.product(layers, range(head, head + count)))
                first = first_heads[name] if view.has_heads else 0
                heads = range(first, first + (view.num_heads if view.has_heads else 1))
                if not came.issuperset(itertools.product(range(view.num_layers), heads)):
                    return name
        return None


@dataclass(eq=False)
class Call:
    """What one sender rank is asked for a request."""

    number: int
    peer: str
    request: Request
    missing: dict[str, set[int]]  # by group: places that were not written yet
    heard_s: float
    num_wanted: int = 0  # slots that it waits for
    moved_s: float = 0.0  # when it last got a slot or a chunk, or began to wait for one
    granted: set[int] = field(default_factory=set)  # slots that it may write to
    parts: dict[tuple[str, int], Part] = field(default_factory=dict)  # that came, by view
    num_pending: int = 0  # chunks that came, and are not unpacked yet
    has_ended: bool = False  # on the sender's side
    replace_s: float = 0.0  # when they get other memory
    gone_s: float | None = None  # when its process turned out to be gone
    lost_s: float | None = None  # since when it is out of reach
    retired: list[torch.Tensor] = field(default_factory=list)  # slots' memory, replaced since

    @property
    def is_complete(self) -> bool:
        return not any(self.missing.values())


@dataclass(eq=False)
class Question:
    """A sending engine's first rank was asked for the others: what is to be sent to them."""

    name: str
    what: Request | Release
    started_s: float
