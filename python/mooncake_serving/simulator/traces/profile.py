"""What a trace is like, in a small file, from which traces like it can be made."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from .errors import InvalidTrace
from .request import BLOCK_SIZE, TraceRequest
from .sharing import sharing_of

FIELDS = ("input_length", "output_length", "matched_blocks", "age", "parent_blocks")
MAX_ARRIVALS = 256  # gaps, and counts, that a profile keeps


@dataclass(frozen=True, slots=True)
class TraceProfile:
    """A sample of a trace's requests and of its arrivals, without what was asked or by whom.

    Attributes:
        block_size: tokens that a hash id stands for.
        rows: requests, each ``(input_length, output_length, matched_blocks, age, parent_blocks)``:
            its lengths, and which prefix it shares with whom (see :class:`~.sharing.Sharing`).
        gaps_ms: times between two moments at which requests arrive.
        counts: requests that arrive at one moment; traces may round their clock.
        source: of which trace it is, and under which licence.
    """

    block_size: int
    rows: tuple[tuple[int, int, int, int, int], ...]
    gaps_ms: tuple[float, ...]
    counts: tuple[int, ...]
    source: str = ""

    @classmethod
    def of(
        cls,
        requests: Sequence[TraceRequest],
        *,
        block_size: int = BLOCK_SIZE,
        max_rows: int = 1024,
        source: str = "",
    ) -> "TraceProfile":
        """Describe a trace by at most ``max_rows`` of its requests, spread evenly over all.

        Args:
            requests: at least one, in the order of time.
            block_size: tokens that a hash id stands for.
            max_rows: what is kept of them.
            source: of which trace it is, and under which licence.

        Raises:
            InvalidTrace: there is no request.
        """
        if not requests:
            raise InvalidTrace("TraceProfile.of", 1, "a trace must hold at least one request")
        rows = [
            (r.input_length, r.output_length, s.matched_blocks, s.age, s.parent_blocks)
            for r, s in zip(requests, sharing_of(requests), strict=True)
        ]
        moments, counts = np.unique([r.timestamp_ms for r in requests], return_counts=True)
        gaps = np.sort(np.diff(moments)) if len(moments) > 1 else np.array([1.0])
        return cls(
            block_size=block_size,
            rows=tuple(_evenly(sorted(rows, key=lambda row: (row[2], row[0])), max_rows)),
            gaps_ms=tuple(float(gap) for gap in _evenly(gaps.tolist(), MAX_ARRIVALS)),
            counts=tuple(int(count) for count in _evenly(np.sort(counts).tolist(), MAX_ARRIVALS)),
            source=source,
        )

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        rows = ",\n".join(json.dumps(row) for row in self.rows)
        rest = {name: value for name, value in asdict(self).items() if name != "rows"}
        text = json.dumps({"fields": FIELDS, **rest})[:-1]
        Path(path).write_text(f'{text}, "rows": [\n{rows}\n]}}\n', encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "TraceProfile":
        """Read a profile that :meth:`save` has written.

        Raises:
            InvalidTrace: the file is none.
        """
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
            rows = tuple(
                (int(n), int(o), int(m), int(a), int(p)) for n, o, m, a, p in record["rows"]
            )
            gaps = tuple(float(gap) for gap in record["gaps_ms"])
            counts = tuple(int(count) for count in record["counts"])
            block_size, source = int(record["block_size"]), str(record.get("source", ""))
        except (ValueError, TypeError, KeyError) as error:
            what = f"must be a profile of a trace: {type(error).__name__} {error}"
            raise InvalidTrace(str(path), 1, what) from None
        whole = all(row[0] >= 1 and min(row) >= 0 and row[2] <= row[4] for row in rows)
        if not (rows and gaps and counts and whole and block_size >= 1 and min(counts) >= 1):
            what = "must be a profile of a trace: a list is empty or a number out of its range"
            raise InvalidTrace(str(path), 1, what)
        return cls(block_size, rows, gaps, counts, source)


def _evenly(values: list, limit: int) -> list:
    """Keep at most ``limit`` values: the middle of each of as many equal parts."""
    if len(values) <= limit:
        return values
    places = ((np.arange(limit) + 0.5) * len(values) / limit).astype(int)
    return [values[place] for place in places]
