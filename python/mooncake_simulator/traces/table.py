"""CSV files of requests: a header with column names, and lines in the order of time."""

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .errors import InvalidTrace
from .request import TraceRequest


def read_table(
    path: str | Path,
    columns: tuple[str, str, str],
    to_ms: Callable[[str], float],
    keep: Callable[[int, int], bool] = lambda input_length, output_length: True,
    total: str | None = None,
) -> Iterator[TraceRequest]:
    """Read requests without prefixes from a CSV file; times count from its first line.

    Args:
        path: of the file; a byte order mark and blank lines are skipped.
        columns: of the time, of the tokens of the prompt and of those generated.
        to_ms: parses a time; raises ValueError.
        keep: decides by the lengths whether a line is a request; others are skipped.
        total: an optional column: the sum of the tokens of the prompt and those generated.

    Raises:
        InvalidTrace: a column is missing, a field cannot be read, a line is earlier than the one
            before it, or a request's total is not the sum of its lengths.
    """
    source = str(path)
    with Path(path).open(encoding="utf-8-sig", errors="replace", newline="") as file:
        rows = _rows(source, csv.reader(file))
        header_line, fields = next(rows, (1, []))
        header = [name.strip() for name in fields]
        missing = [name for name in columns if name not in header]
        if missing:
            raise InvalidTrace(
                source, header_line, f"header must have {missing[0]!r}, got {header}"
            )
        places = [header.index(name) for name in columns]
        if total in header:
            places.append(header.index(total))
        first_ms = previous_ms = None
        for number, row in rows:
            if len(row) <= max(places):
                what = f"must have {len(header)} fields, got {len(row)}"
                raise InvalidTrace(source, number, what)
            time, input_text, output_text, *total_text = (row[place].strip() for place in places)
            try:
                time_ms = to_ms(time)
            except (ValueError, OverflowError):
                what = f"{columns[0]} must be a time, got {time!r}"
                raise InvalidTrace(source, number, what) from None
            input_length = _count(source, number, columns[1], input_text)
            output_length = _count(source, number, columns[2], output_text)
            if first_ms is None or previous_ms is None:
                first_ms = previous_ms = time_ms
            if not time_ms >= previous_ms:
                what = f"{columns[0]} must not be before the line above, got {time!r}"
                raise InvalidTrace(source, number, what)
            previous_ms = time_ms
            if keep(input_length, output_length):
                if input_length < 1:
                    what = f"{columns[1]} must be at least 1, got {input_length}"
                    raise InvalidTrace(source, number, what)
                if total is not None and total_text:
                    expected = input_length + output_length
                    if _count(source, number, total, total_text[0]) != expected:
                        what = f"{total} must be {expected}, the sum of both, got {total_text[0]}"
                        raise InvalidTrace(source, number, what)
                yield TraceRequest(time_ms - first_ms, input_length, output_length)


def _rows(source: str, reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Number the lines that are not blank, and name the one that is not CSV."""
    while True:
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise InvalidTrace(source, reader.line_num, f"must be CSV: {error}") from None
        if "".join(row).strip() or len(row) > 1:
            yield reader.line_num, row


def _count(source: str, number: int, name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        what = f"{name} must be an integer of at least 0, got {text[:40]!r}"
        raise InvalidTrace(source, number, what)
    return int(text)
