"""Where the next copies of an object go: functions of the members, without any requests."""

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mooncake_kernels.errors import InvalidArgument

from ..checks import check_bool, check_integer
from ..cluster.membership import check_preferred, preference
from ..directory import Member


@dataclass(frozen=True)
class Placement:
    """Preferences among members that could take a copy.

    Attributes:
        preferred: names of members, or hosts, the best first: taken before all others, even if
            their host already has a copy.
        near: a host that is taken before others while it has no copy; "" for none.
        num_sampled: the pool with the most free space is chosen among this many, drawn by the seed;
            None: among all. Many callers that know the same free bytes would otherwise fill the
            same pool.
        may_evict: also take pools that must evict to have room, after those that have it.
    """

    preferred: Sequence[str] = ()
    near: str = ""
    num_sampled: int | None = None
    may_evict: bool = False

    def __post_init__(self) -> None:
        check_preferred("Placement", self.preferred)
        if not isinstance(self.near, str):
            raise InvalidArgument(f"Placement: near must be a host's name, got {self.near!r}")
        if self.num_sampled is not None:
            check_integer("Placement", "num_sampled", self.num_sampled, 1)
        check_bool("Placement", "may_evict", self.may_evict)

    def preference(self, member: Member) -> int:
        """Rank of this member in ``preferred``; the number of entries if it is not there."""
        return preference(member, self.preferred)


def check_placement(op: str, placement: object) -> None:
    """Refuse a value that is not a placement."""
    if not isinstance(placement, Placement):
        raise InvalidArgument(f"{op}: placement must be a Placement, got {placement!r:.80}")


@dataclass(frozen=True)
class Choice:
    """A member that takes a copy, and why."""

    member: Member
    reason: str


class _Rank(NamedTuple):
    """What is compared before free bytes, the most important first; smaller is better."""

    must_evict: bool
    preference: int
    host_has_copy: bool
    is_far: bool


def place(
    members: Iterable[Member],
    num_copies: int,
    num_bytes: int,
    *,
    having: Collection[str] = (),
    placement: Placement = Placement(),
    seed: int = 0,
) -> list[Choice]:
    """Choose the members that take the next copies of an object, each with a different pool.

    Equivalent to::

        for each copy, among pools that have none, have room and are not all draining:
            the preferred first
            then those of hosts that have no copy, before other pools of hosts that have
            then those near
            of what is left: a sample, and of this the pool with the largest part free

    Args:
        members: the live members, in any order.
        num_copies: how many are wanted.
        num_bytes: size of the object; 0 if unknown.
        having: names of pools that have the object.
        placement: the preferences.
        seed: the same seed gives the same choice.

    Returns:
        At most ``num_copies``, in the order of choice; fewer if there are no more pools.

    Raises:
        InvalidArgument: a number is out of range.
    """
    check_integer("place", "num_copies", num_copies, 0)
    check_integer("place", "num_bytes", num_bytes, 0)
    everyone = sorted(members, key=lambda member: member.name)
    random_source = random.Random(seed)
    random_source.shuffle(everyone)
    hosts = {member.host for member in everyone if member.pool in having}
    able = [m for m in everyone if not refusal(m, num_bytes, having, placement)]
    pools: dict[str, Member] = {}
    for member in sorted(able, key=placement.preference):
        pools.setdefault(member.pool, member)  # of the members that serve one pool, any will do
    choices: list[Choice] = []
    while pools and len(choices) < num_copies:
        ranks = {pool: _rank(m, num_bytes, hosts, placement) for pool, m in pools.items()}
        best = min(ranks.values())
        tier = [pool for pool, rank in ranks.items() if rank == best]
        num_sampled = min(placement.num_sampled or len(tier), len(tier))
        sample = random_source.sample(tier, num_sampled)
        pool = max(sample, key=lambda pool: free_ratio(pools[pool]))
        member = pools.pop(pool)
        hosts.add(member.host)
        choices.append(Choice(member, _reason(member, best, placement, num_sampled)))
    return choices


def refusal(
    member: Member, num_bytes: int, having: Collection[str], placement: Placement = Placement()
) -> str:
    """Why a member cannot take a copy; "" if it can."""
    if not member.pool:
        return "it serves no pool"
    if member.pool in having:
        return "its pool has the object"
    if member.is_draining:
        return "it is draining"
    room = member.capacity_bytes if placement.may_evict else member.free_bytes
    if room < num_bytes:
        return f"it has no room for {num_bytes} bytes: {room}"
    return ""


def free_ratio(member: Member) -> float:
    """The share of its pool that is free, 0 to 1."""
    return member.free_bytes / member.capacity_bytes if member.capacity_bytes else 0.0


def explain(
    members: Iterable[Member],
    num_copies: int,
    num_bytes: int,
    *,
    having: Collection[str] = (),
    placement: Placement = Placement(),
    seed: int = 0,
) -> list[str]:
    """Explain for every member why ``place``, with the same arguments, chooses it or not.

    Returns:
        One line per member: those chosen, in the order of choice, then the others by name.

    Raises:
        InvalidArgument: as ``place`` does.
    """
    everyone = sorted(members, key=lambda member: member.name)
    choices = place(everyone, num_copies, num_bytes, having=having, placement=placement, seed=seed)
    chosen = {choice.member.pool: choice.member.name for choice in choices}
    lines = [f"{choice.member.name}: {choice.reason}" for choice in choices]
    for member in everyone:
        if chosen.get(member.pool) == member.name:
            continue
        why_not = refusal(member, num_bytes, having, placement)
        if not why_not and member.pool in chosen:
            why_not = f"{chosen[member.pool]} takes it into the same pool"
        lines.append(f"{member.name}: not chosen: {why_not or 'others come first'}")
    return lines


def _rank(member: Member, num_bytes: int, hosts: Collection[str], placement: Placement) -> _Rank:
    return _Rank(
        must_evict=member.free_bytes < num_bytes,
        preference=placement.preference(member),
        host_has_copy=member.host in hosts,
        is_far=member.host != placement.near,
    )


def _reason(member: Member, rank: _Rank, placement: Placement, num_sampled: int) -> str:
    if rank.preference < len(placement.preferred):
        why = f"{placement.preferred[rank.preference]} is preferred"
    elif rank.host_has_copy:
        why = f"no other host can, {member.host} has a copy"
    elif rank.is_far:
        why = f"{member.host} has no copy"
    else:
        why = f"{member.host} is near and has no copy"
    how = "must evict" if rank.must_evict else f"{free_ratio(member):.0%} free"
    return f"{why}; {how}, the most of {num_sampled}"
