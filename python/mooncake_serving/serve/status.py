"""``serve status``: the engines behind a router, as a table."""

import argparse
import json
import sys
from typing import Any

import httpx

from mooncake_kernels.errors import InvalidArgument

TIMEOUT_S = 10.0
COLUMNS = {
    "name": "ENGINE",
    "role": "ROLE",
    "up": "UP",
    "prefills": "PREFILLS",
    "decoding": "DECODING",
    "kv_tokens": "TOKENS",
    "capacity_tokens": "CAPACITY",
    "held_blocks": "BLOCKS KEPT",
    "url": "URL",
}


def run(options: argparse.Namespace) -> int:
    """Print the table; returns 1 if an engine is down."""
    content = get_json(options.url, "/instances")
    instances: list[dict[str, Any]] = content["instances"]
    text = json.dumps(content) if options.json else _table(instances)
    sys.stdout.write(text + "\n")
    return 0 if all(one["up"] for one in instances) else 1


def get_json(url: str, path: str) -> Any:
    """Ask a router for JSON.

    Raises:
        InvalidArgument: what is no URL.
        ConnectionError: no router answers there.
    """
    try:
        answer = httpx.get(url.rstrip("/") + path, timeout=TIMEOUT_S, trust_env=False)
        answer.raise_for_status()
        return answer.json()
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise InvalidArgument(f"serve: --url must be a URL, got {url!r} ({error})") from None
    except (httpx.HTTPError, ValueError) as error:
        raise ConnectionError(f"serve: {url}{path}: {error}") from None


def _table(instances: list[dict[str, Any]]) -> str:
    rows = [list(COLUMNS.values())]
    rows += [[_cell(one[name]) for name in COLUMNS] for one in instances]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
