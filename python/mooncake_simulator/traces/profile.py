"""A description of a trace in a small file, from which similar traces can be generated."""

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .errors import InvalidTrace
from .families import NO_HUB, Family, Member, families_of
from .request import BLOCK_SIZE, TraceRequest

FIELDS = ("gap", "input_length", "output_length", "parent", "matched_blocks")
MAX_ARRIVALS = 256  # gaps, and counts, that a profile keeps
MIN_HUB, HUB_SHARE = 32, 0.01  # a hub: more requests than that, and this share of all


@dataclass(frozen=True, slots=True)
class TraceProfile:
    """A sample of a trace's requests and of its arrivals, without any contents or users.

    Attributes:
        block_size: tokens that a hash id stands for.
        hubs: blocks that very many requests begin with, each as the index of the one before it, or
            -1 (see :mod:`~.families`).
        families: some of the trace's, each complete.
        gaps_ms: times between two moments at which requests arrive.
        counts: requests that arrive at one moment; traces may round their clock.
        source: name and licence of the trace.
    """

    block_size: int
    hubs: tuple[int, ...]
    families: tuple[Family, ...]
    gaps_ms: tuple[float, ...]
    counts: tuple[int, ...]
    source: str = ""

    @classmethod
    def of(
        cls,
        requests: Sequence[TraceRequest],
        *,
        block_size: int = BLOCK_SIZE,
        max_requests: int = 4096,
        source: str = "",
    ) -> "TraceProfile":
        """Describe a trace by about ``max_requests`` of its requests: families, small and large.

        Args:
            requests: at least one, in the order of time.
            block_size: tokens that a hash id stands for.
            max_requests: about how many of them are kept.
            source: name and licence of the trace.

        Raises:
            InvalidTrace: there is no request.
        """
        if not requests:
            raise InvalidTrace("TraceProfile.of", 1, "a trace must hold at least one request")
        max_size = max(MIN_HUB, int(HUB_SHARE * len(requests)))
        hubs, families = families_of(requests, min(max_size, max(1, max_requests // 4)))
        families.sort(key=lambda family: (len(family.members), family.num_tokens))
        num_kept = -(-len(families) * max_requests // max(max_requests, len(requests)))
        moments, counts = np.unique([r.timestamp_ms for r in requests], return_counts=True)
        gaps = np.sort(np.diff(moments)) if len(moments) > 1 else np.array([1.0])
        return cls(
            block_size=block_size,
            hubs=tuple(hubs),
            families=tuple(_evenly(families, num_kept)),
            gaps_ms=tuple(float(gap) for gap in _evenly(gaps.tolist(), MAX_ARRIVALS)),
            counts=tuple(int(count) for count in _evenly(np.sort(counts).tolist(), MAX_ARRIVALS)),
            source=source,
        )

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        record: dict[str, Any] = {
            "fields": FIELDS,
            "block_size": self.block_size,
            "hubs": self.hubs,
            "gaps_ms": self.gaps_ms,
            "counts": self.counts,
            "source": self.source,
        }
        families = ",\n".join(
            json.dumps([family.hub, *map(astuple, family.members)]) for family in self.families
        )
        text = json.dumps(record)[:-1]
        Path(path).write_text(f'{text}, "families": [\n{families}\n]}}\n', encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "TraceProfile":
        """Read a profile that :meth:`save` has written.

        Raises:
            InvalidTrace: the file is not a profile.
        """
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
            profile = cls(
                block_size=int(record["block_size"]),
                hubs=tuple(map(int, record["hubs"])),
                families=tuple(
                    Family(int(hub), tuple(Member(*map(int, member)) for member in members))
                    for hub, *members in record["families"]
                ),
                gaps_ms=tuple(map(float, record["gaps_ms"])),
                counts=tuple(map(int, record["counts"])),
                source=str(record.get("source", "")),
            )
        except json.JSONDecodeError as error:
            what = f"must be a profile of a trace: {error.msg} at column {error.colno}"
            raise InvalidTrace(str(path), error.lineno, what) from None
        except (ValueError, TypeError, KeyError) as error:
            what = f"must be a profile of a trace: {type(error).__name__} {error}"
            raise InvalidTrace(str(path), 1, what) from None
        if not profile._is_whole():
            what = "must be a profile of a trace: a list is empty or a number out of its range"
            raise InvalidTrace(str(path), 1, what)
        return profile

    def _is_whole(self) -> bool:
        return (
            bool(self.families and self.gaps_ms and self.counts)
            and min(self.block_size, *self.counts) >= 1
            and all(NO_HUB <= hub < place for place, hub in enumerate(self.hubs))
            and all(NO_HUB <= family.hub < len(self.hubs) for family in self.families)
            and all(family.members and _are_whole(family.members) for family in self.families)
        )


def _are_whole(members: tuple[Member, ...]) -> bool:
    return all(
        min(astuple(member)) >= 0 and member.input_length >= 1 and member.parent < max(1, place)
        for place, member in enumerate(members)
    )


def _evenly(values: list, limit: int) -> list:
    """Keep at most ``limit`` values: the middle of each of that many equal parts."""
    if len(values) <= limit:
        return values
    places = ((np.arange(limit) + 0.5) * len(values) / limit).astype(int)
    return [values[place] for place in places]
