"""Which requests of a trace share prefixes with each other: families and hubs.

A prefix that very many requests begin with (a system prompt, a tool's) is a hub; requests that
share a longer prefix than that are a family: the turns of a conversation, the readers of a
document.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from .request import TraceRequest

NO_HUB = -1


@dataclass(frozen=True, slots=True)
class Member:
    """A request of a family.

    Attributes:
        gap: how many requests of the trace after the previous member; 0 for the first one.
        input_length, output_length: of the request.
        parent: the member, counted from 0, that was the last to use the prefix; 0 for the first.
        matched_blocks: of that prefix; 0 for the first, whose hub determines it.
    """

    gap: int
    input_length: int
    output_length: int
    parent: int
    matched_blocks: int


@dataclass(frozen=True, slots=True)
class Family:
    """Requests in the order of time, each of which shares more than a hub with an earlier one.

    Attributes:
        hub: with which all of them begin, as an index into the hubs, or ``NO_HUB``.
        members: at least one.
    """

    hub: int
    members: tuple[Member, ...]

    @property
    def num_tokens(self) -> int:
        """Total tokens of all members' prompts."""
        return sum(member.input_length for member in self.members)


def families_of(requests: Sequence[TraceRequest], max_size: int) -> tuple[list[int], list[Family]]:
    """Split a trace into families.

    Args:
        requests: in the order of time.
        max_size: a block that more requests than this begin with belongs to a hub.

    Returns:
        The hubs, one block each, as the index of the one before it or ``NO_HUB``; and the families
        in the order of their first members. A request that shares nothing is a family of its own.
    """
    uses = Counter(key for request in requests for key in request.hash_ids)
    hubs: dict[int, int] = {}  # a block's index in `before`
    before: list[int] = []
    hub_of: dict[Hashable, int] = {}  # of a family
    members: dict[Hashable, list[Member]] = {}  # of a family
    newest: dict[Hashable, int] = {}  # of a family, where in the trace its newest member is
    last_use: dict[int, int] = {}  # of a block, which member of its family
    for index, request in enumerate(requests):
        hub, begin = NO_HUB, tuple(takewhile(lambda key: uses[key] > max_size, request.hash_ids))
        for key in begin:
            if key not in hubs:
                hubs[key] = len(before)
                before.append(hub)
            hub = hubs[key]
        rest = request.hash_ids[len(begin) :]
        name: Hashable = rest[0] if rest else ("alone", index)
        own = members.setdefault(name, [])
        seen = tuple(takewhile(last_use.__contains__, rest))
        matched, parent = (len(begin) + len(seen), last_use[seen[-1]]) if seen else (0, 0)
        last_use.update(dict.fromkeys(rest, len(own)))
        gap = index - newest.get(name, index)
        own.append(Member(gap, request.input_length, request.output_length, parent, matched))
        newest[name], hub_of[name] = index, hub
    return before, [Family(hub_of[name], tuple(own)) for name, own in members.items()]
