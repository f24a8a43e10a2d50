"""Files of results: JSON lines, first what was measured and on which machine, then a row a line."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass
class Results:
    """What a bench has measured.

    Attributes:
        head: the bench, the machine, versions, commit and command.
        rows: one for each case that was measured.
        left_out: one for each that was not, with the reason as ``left_out``.
    """

    head: Row
    rows: list[Row] = field(default_factory=list)
    left_out: list[Row] = field(default_factory=list)


def write(path: Path, results: Results) -> None:
    """Replace the file."""
    path.write_text("".join(_lines([results.head, *results.rows, *results.left_out])))


def read(path: Path) -> Results:
    """Read what ``write`` has written.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is empty, or a line is not JSON.
    """
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if not lines:
        raise ValueError(f"{path} must be results, got an empty file")
    results = Results(lines[0])
    for row in lines[1:]:
        (results.left_out if "left_out" in row else results.rows).append(row)
    return results


def _lines(objects: Iterable[Row]) -> Iterable[str]:
    return (json.dumps(one) + "\n" for one in objects)
