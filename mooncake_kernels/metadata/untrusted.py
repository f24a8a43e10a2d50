"""Checks and bounds for data from others, before it is used."""

import json
from typing import Any

from ..errors import Unavailable, shown

MAX_VALUE_BYTES = 16 << 20  # per key: a segment of some 100,000 buffers


class Malformed(Unavailable):
    """The server's data is invalid."""


def json_object(value: bytes) -> dict[str, Any]:
    """Parse a JSON object; raise ``Malformed`` if it is invalid."""
    if len(value) > MAX_VALUE_BYTES:
        raise Malformed(f"it must be at most {MAX_VALUE_BYTES} bytes")
    try:
        document = json.loads(value)
    except (ValueError, RecursionError):
        raise Malformed(f"it must be JSON, got {quoted(value)}") from None
    if not isinstance(document, dict):
        raise Malformed(f"it must be a JSON object, got {quoted(document)}")
    return document


def integer(document: dict[str, Any], field: str, low: int, high: int) -> int:
    """Return an integer; raise ``Malformed`` unless it is one in [low, high]."""
    value = document.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise Malformed(f"{field} must be an integer in {low} to {high}, got {quoted(value)}")
    return value


def text(document: dict[str, Any], field: str) -> str:
    """Return a string as one line of ASCII; empty if there is none."""
    value = document.get(field)
    return printable(value) if isinstance(value, str) else ""


def objects(document: dict[str, Any], field: str) -> list[dict[str, Any]]:
    """Return a list of objects, empty if there is none; raise ``Malformed`` for anything else."""
    value = document.get(field) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise Malformed(f"{field} must be a list of objects, got {quoted(value)}")
    return value


def quoted(value: Any) -> str:
    """A value for the text of an error: at most one line of it."""
    return printable(shown(value), 100)


def printable(words: str, max_chars: int = 255) -> str:
    """One line of ASCII, safe to print."""
    return "".join(c if " " <= c <= "~" else "?" for c in words[:max_chars])
