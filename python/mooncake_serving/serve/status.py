"""``serve status``: the engines behind a router, as a table."""

import argparse
import json
import sys
from typing import Any

import httpx

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.private_files import first_line

from .table import aligned

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
    content = get_json(options.url, "/instances", headers_of(options))
    instances: list[dict[str, Any]] = content["instances"]
    text = json.dumps(content) if options.json else _table(instances)
    sys.stdout.write(text + "\n")
    return 0 if all(one["up"] for one in instances) else 1


def headers_of(options: argparse.Namespace) -> dict[str, str]:
    """Return the headers of requests to a router: with the key, if a file has one.

    Raises:
        ValueError: its first line is none.
        OSError: the file cannot be read.
    """
    if options.api_key_file is None:
        return {}
    return {"Authorization": f"Bearer {first_line(options.api_key_file)}"}


def get_json(url: str, path: str, headers: dict[str, str]) -> Any:
    """Ask a router for JSON.

    Args:
        url: of the router.
        path: what is asked for.
        headers: see ``headers_of``.

    Raises:
        InvalidArgument: what is no URL.
        ConnectionError: no router answers there.
    """
    try:
        answer = httpx.get(
            url.rstrip("/") + path, headers=headers, timeout=TIMEOUT_S, trust_env=False
        )
        answer.raise_for_status()
        return answer.json()
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise InvalidArgument(f"serve: --url must be a URL, got {url!r} ({error})") from None
    except (httpx.HTTPError, ValueError) as error:
        raise ConnectionError(f"serve: {url}{path}: {error}") from None


def _table(instances: list[dict[str, Any]]) -> str:
    rows = [[_cell(one[name]) for name in COLUMNS] for one in instances]
    return aligned([[*COLUMNS.values()], *rows])


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
