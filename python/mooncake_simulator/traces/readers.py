"""Traces from files: Mooncake's JSON lines, Azure's and BurstGPT's CSV."""

from collections.abc import Callable, Iterator
from os import PathLike
from pathlib import Path

from mooncake_serving.conductor.errors import InvalidArgument, shown

from .azure import read_azure
from .burstgpt import read_burstgpt
from .errors import InvalidTrace
from .mooncake import read_mooncake
from .request import TraceRequest


def read_trace(path: str | Path) -> list[TraceRequest]:
    """Read a whole trace, in the format that its first line shows; blank lines do not count.

    Args:
        path: of Mooncake's JSON lines, or of a CSV file of Azure or BurstGPT.

    Raises:
        InvalidArgument: what is no path.
        InvalidTrace: it is none of these, holds no request, or a line is wrong; named by number.
        OSError: it cannot be read.
    """
    requests = list(reader_of(path)(path))
    if not requests:
        raise InvalidTrace(str(path), 1, "a trace must hold at least one request")
    return requests


def reader_of(path: str | Path) -> Callable[[str | Path], Iterator[TraceRequest]]:
    """Choose the reader of a file by its first line, for example :func:`read_mooncake`.

    Raises:
        InvalidArgument: what is no path.
        InvalidTrace: its format is unknown, or it is empty.
        OSError: it cannot be read.
    """
    if not isinstance(path, str | PathLike):
        raise InvalidArgument(f"read_trace: path must be a path, got {shown(path)}")
    with Path(path).open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                return _reader_for(line, str(path), number)
    raise InvalidTrace(str(path), 1, "a trace must hold at least one request")


def _reader_for(
    line: str, source: str, number: int
) -> Callable[[str | Path], Iterator[TraceRequest]]:
    if line.lstrip().startswith("{"):
        return read_mooncake
    columns = {column.strip() for column in line.split(",")}
    if "ContextTokens" in columns:
        return read_azure
    if "Request tokens" in columns:
        return read_burstgpt
    raise InvalidTrace(
        source,
        number,
        "must be a JSON object (Mooncake), or a header with ContextTokens (Azure) or "
        f"Request tokens (BurstGPT), got {line.strip()[:60]!r}",
    )
