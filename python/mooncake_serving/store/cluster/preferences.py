"""Which members a caller prefers: names of members, or of hosts, the best first."""

from collections.abc import Sequence
from typing import Any

from mooncake_kernels.errors import InvalidArgument

from ..directory import Member


def check_preferred(op: str, preferred: Any) -> None:
    """Refuse a value that is not a sequence of names."""
    if isinstance(preferred, str | bytes) or not (
        isinstance(preferred, Sequence) and all(isinstance(name, str) for name in preferred)
    ):
        raise InvalidArgument(
            f"{op}: preferred must be a sequence of names and hosts, got {preferred!r:.80}"
        )


def preference(member: Member, preferred: Sequence[str]) -> int:
    """Rank of a member among the preferred; the number of these if it is none of them."""
    for place, wish in enumerate(preferred):
        if wish in (member.name, member.host):
            return place
    return len(preferred)
