"""Synthetic traces that resemble a profile: in lengths, arrivals and shared prefixes."""

import numpy as np

from mooncake_serving.conductor.errors import check_count, check_instance

from .families import NO_HUB, Family, Member
from .profile import TraceProfile
from .request import TraceRequest


def synth_trace(profile: TraceProfile, num_requests: int, *, seed: int = 0) -> list[TraceRequest]:
    """Generate a trace.

    Equivalent to::

        until there are num_requests of them:
            family = one of the profile's, each as often as the others
            its first request comes anywhere in the trace, but early enough for all of the others;
            each of them comes family.members[i].gap requests after the one before it, and its
            hash_ids are the first matched_blocks of its parent's, then new ones
        they arrive at the same moment as the one before or after a gap, as the profile's do

    So the lengths, how many share a prefix, how long it is and how long until it is used again are
    the profile's, and with them the hits of a cache of a given size. What is lost: how the load
    changes over minutes, and which families occur together. In a trace that is shorter than the
    profile's, families that would not end in it come closer together.

    Args:
        profile: of the trace to resemble.
        num_requests: at least 1.
        seed: at least 0; the same seed makes the same trace.

    Raises:
        InvalidArgument: an argument is not as above.
    """
    check_instance("synth_trace", "profile", profile, TraceProfile)
    check_count("synth_trace", "num_requests", num_requests, 1)
    check_count("synth_trace", "seed", seed, 0)
    rng = np.random.default_rng(seed)
    times = _arrivals(profile, num_requests, rng)
    families = _families(profile, num_requests, rng)
    places = np.concatenate([_places(family, num_requests, rng) for family in families])
    owners = [(k, member) for k, family in enumerate(families) for member in family.members]
    chains = _Chains(profile, families)
    requests = []
    for time, place in zip(times, np.argsort(places, kind="stable"), strict=True):
        k, member = owners[place]
        ids = chains.add(k, member)
        requests.append(TraceRequest(time, member.input_length, member.output_length, ids))
    return requests


def _arrivals(profile: TraceProfile, num_requests: int, rng: np.random.Generator) -> list[float]:
    """Draw times, and how many requests arrive at each; the first time is 0."""
    counts = rng.choice(profile.counts, num_requests)  # each at least 1: enough of them
    num_moments = int(np.searchsorted(np.cumsum(counts), num_requests)) + 1
    gaps = rng.choice(profile.gaps_ms, num_moments)
    moments = np.concatenate(([0.0], np.cumsum(gaps)))[:num_moments]
    return np.repeat(moments, counts[:num_moments])[:num_requests].tolist()


def _families(profile: TraceProfile, num_requests: int, rng: np.random.Generator) -> list[Family]:
    """Draw families with this many members in total, the last one cut short if need be."""
    drawn: list[Family] = []
    left = num_requests
    while True:
        for place in rng.permutation(len(profile.families)):
            family = profile.families[place]
            drawn.append(Family(family.hub, family.members[:left]))
            left -= len(drawn[-1].members)
            if not left:
                return drawn


def _places(family: Family, num_requests: int, rng: np.random.Generator) -> np.ndarray:
    """Return where in the trace its members come, all of them within it."""
    places = np.cumsum([member.gap for member in family.members], dtype=np.float64)
    last = num_requests - 1
    if places[-1] > last:
        places *= last / places[-1]
    return places + rng.uniform(0, max(0.0, last - places[-1]))


class _Chains:
    """The hash ids of each family's members so far, numbered as they come."""

    def __init__(self, profile: TraceProfile, families: list[Family]) -> None:
        self._profile = profile
        self._hubs: dict[int, tuple[int, ...]] = {NO_HUB: ()}
        self._of_family: list[list[tuple[int, ...]]] = [[] for _ in families]
        self._hub_of = [family.hub for family in families]
        self._num_ids = 0

    def add(self, k: int, member: Member) -> tuple[int, ...]:
        """Return the hash ids of the next member of a family."""
        chains = self._of_family[k]
        shared = chains[member.parent][: member.matched_blocks] if chains else self._hub(k)
        num_blocks = -(-member.input_length // self._profile.block_size)
        chain = (*shared, *self._new(num_blocks - len(shared)))[:num_blocks]
        chains.append(chain)
        return chain

    def _hub(self, k: int) -> tuple[int, ...]:
        missing = []
        hub = self._hub_of[k]
        while hub not in self._hubs:
            missing.append(hub)
            hub = self._profile.hubs[hub]
        for later in reversed(missing):
            self._hubs[later] = (*self._hubs[hub], *self._new(1))
            hub = later
        return self._hubs[hub]

    def _new(self, count: int) -> range:
        first = self._num_ids
        self._num_ids += max(0, count)
        return range(first, self._num_ids)
