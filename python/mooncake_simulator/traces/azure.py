"""Azure's LLM inference traces of 2023 and 2024 (AzurePublicDataset): lengths without prefixes."""

from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

from .request import TraceRequest
from .table import read_table

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_azure(path: str | Path) -> Iterator[TraceRequest]:
    """Read ``TIMESTAMP,ContextTokens,GeneratedTokens`` lines; times count from the first one.

    Times are ``2023-11-16 18:15:46.6805900`` or ``2024-05-10 00:00:00.009930+00:00``.

    Raises:
        InvalidTrace: a line is not as above, or earlier than the one before it.
    """
    return read_table(path, COLUMNS, _to_ms)


def _to_ms(text: str) -> float:
    """Parse a time; Python before 3.11 requires exactly 6 digits after the point."""
    whole, point, rest = text.partition(".")
    zone_at = next((i for i, char in enumerate(rest) if char in "+-Z"), len(rest))
    digits, zone = rest[:zone_at], rest[zone_at:].replace("Z", "+00:00")
    if point and not digits.isdigit():
        raise ValueError(text)
    moment = datetime.fromisoformat(whole + zone)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return moment.timestamp() * 1e3 + (float(f"0.{digits}") * 1e3 if digits else 0.0)
