"""Mooncake's traces: one JSON object per line."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .errors import InvalidTrace
from .request import BLOCK_SIZE, TraceRequest


def read_mooncake(
    path: str | Path, *, block_size: int = BLOCK_SIZE, check_prefixes: bool = True
) -> Iterator[TraceRequest]:
    """Read ``{"timestamp", "input_length", "output_length", "hash_ids"}`` lines, one by one.

    Args:
        path: of the file; a byte order mark and blank lines are skipped.
        block_size: tokens that a hash id stands for.
        check_prefixes: also check that a hash id always follows the same one, since it otherwise
            could not name a prefix; remembers all ids.

    Raises:
        InvalidTrace: a line is not such an object, is earlier than the one before it, does not have
            ``ceil(input_length / block_size)`` hash ids, or an id names two prefixes.
    """
    source = str(path)
    previous_ms = 0.0
    parents: dict[int, int] = {}
    with Path(path).open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            request = _parse(source, number, line, block_size)
            if request.timestamp_ms < previous_ms:
                what = f"timestamp must not be below {previous_ms:g}, got {request.timestamp_ms:g}"
                raise InvalidTrace(source, number, what)
            previous_ms = request.timestamp_ms
            if check_prefixes:
                _check_parents(source, number, request.hash_ids, parents)
            yield request


def write_mooncake(requests: Iterable[TraceRequest], path: str | Path) -> None:
    """Write a trace as JSON lines, as :func:`read_mooncake` reads them."""
    with Path(path).open("w", encoding="utf-8") as file:
        for request in requests:
            timestamp = request.timestamp_ms
            record = {
                "timestamp": int(timestamp) if timestamp == int(timestamp) else timestamp,
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": list(request.hash_ids),
            }
            file.write(json.dumps(record) + "\n")


def _parse(source: str, number: int, line: str, block_size: int) -> TraceRequest:
    try:
        record = json.loads(line.rstrip())
    except json.JSONDecodeError as error:  # it counts lines too, and knows only this one
        what = f"must be a JSON object: {error.msg} at column {error.colno}"
        raise InvalidTrace(source, number, what) from None
    except (ValueError, RecursionError) as error:
        raise InvalidTrace(source, number, f"must be a JSON object: {error}") from None
    if not isinstance(record, dict):
        raise InvalidTrace(source, number, f"must be a JSON object, got {type(record).__name__}")
    timestamp = _number(source, number, record, "timestamp", 0, whole=False)
    input_length = int(_number(source, number, record, "input_length", 1))
    output_length = int(_number(source, number, record, "output_length", 0))
    hash_ids = record.get("hash_ids")
    if not isinstance(hash_ids, list) or not all(type(i) is int and i >= 0 for i in hash_ids):
        raise InvalidTrace(source, number, "hash_ids must be a list of integers of at least 0")
    expected = -(-input_length // block_size)
    if len(hash_ids) != expected:
        what = (
            f"hash_ids must be {expected} for {input_length} tokens in blocks of {block_size}, "
            f"got {len(hash_ids)}"
        )
        raise InvalidTrace(source, number, what)
    return TraceRequest(timestamp, input_length, output_length, tuple(hash_ids))


def _number(
    source: str, number: int, record: dict[str, Any], name: str, low: int, whole: bool = True
) -> float:
    value = record.get(name)
    types = (int,) if whole else (int, float)
    if type(value) not in types or not low <= value < 2**53:  # type: ignore[operator]
        kind = "an integer" if whole else "a number"
        what = f"{name} must be {kind} of at least {low}, got {value!r}"
        raise InvalidTrace(source, number, what)
    return value  # type: ignore[return-value]


def _check_parents(
    source: str, number: int, hash_ids: tuple[int, ...], parents: dict[int, int]
) -> None:
    parent = -1
    for hash_id in hash_ids:
        known = parents.setdefault(hash_id, parent)
        if known != parent:
            before = [f"hash id {i}" if i >= 0 else "nothing" for i in (known, parent)]
            what = f"hash id {hash_id} must follow {before[0]} as before, got {before[1]}"
            raise InvalidTrace(source, number, what)
        parent = hash_id
