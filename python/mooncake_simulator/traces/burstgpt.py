"""BurstGPT's traces of ChatGPT and GPT-4 (arXiv 2401.17644): lengths without prefixes."""

import math
from collections.abc import Iterator
from pathlib import Path

from .request import TraceRequest
from .table import read_table

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")
TOTAL = "Total tokens"


def read_burstgpt(path: str | Path) -> Iterator[TraceRequest]:
    """Read ``Timestamp,...,Request tokens,Response tokens,...`` lines; times are in seconds.

    Failed requests, which have no response tokens, are skipped.

    Raises:
        InvalidTrace: a line is not as above, or earlier than the one before it, or its total, if
            the file has one, is not the sum of both.
    """
    return read_table(path, COLUMNS, _to_ms, lambda _, output_length: output_length > 0, TOTAL)


def _to_ms(text: str) -> float:
    seconds = float(text)
    if not math.isfinite(seconds):
        raise ValueError(text)
    return seconds * 1e3
