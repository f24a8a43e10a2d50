"""``list``, ``get``, ``put``, ``remove``: objects of a pool of this host, as files."""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

from mooncake_kernels.errors import ChecksumError, shown
from mooncake_kernels.pool import PutResult

from ..keyspace import key_text
from ..object_list import list_objects
from ..store import Store
from .options import (
    KEY_HELP,
    Failed,
    add_command,
    add_namespace,
    add_pool,
    as_count,
    open_pool,
    pool_key,
    store_key,
)

PART_BYTES = 1 << 20  # that are read at once: read() allocates all that it is asked for
REASONS = {
    PutResult.EXISTS: "there is such an object already, and objects do not change",
    PutResult.BEING_WRITTEN: "another process writes it just now",
    PutResult.FULL: "there is no room, and what there is cannot be evicted",
}


def add_commands(commands: Any) -> None:
    """Declare the commands."""
    listing = add_command(
        commands, "list", run_list, "List objects by their keys.", "list /dev/shm/kv --prefix 00ff"
    )
    add_pool(listing)
    listing.add_argument("--prefix", default="", metavar="DIGITS", help="of the keys")
    listing.add_argument("--limit", type=as_count, metavar="N", help="how many at most")
    listing.add_argument("--json", action="store_true", help="an object a line")

    get = add_command(
        commands, "get", run_get, "Write an object to a file.", "get /dev/shm/kv greeting out.txt"
    )
    add_pool(get)
    get.add_argument("key", metavar="KEY", help=KEY_HELP)
    get.add_argument("file", nargs="?", default="-", metavar="FILE", help="-: standard output")
    add_namespace(get)

    put = add_command(
        commands, "put", run_put, "Store a file as an object.", "put /dev/shm/kv greeting - < a.txt"
    )
    add_pool(put)
    put.add_argument("key", metavar="KEY", help=KEY_HELP)
    put.add_argument("file", nargs="?", default="-", metavar="FILE", help="-: standard input")
    put.add_argument(
        "--retention", choices=["normal", "soft", "hard"], default="normal",
        help="soft goes last, hard is never evicted",
    )  # fmt: skip
    add_namespace(put)

    remove = add_command(
        commands, "remove", run_remove,
        "Remove objects from a pool, and from a disk behind it; what only the disk had counts as "
        "absent, and is removed all the same.",
        "remove /dev/shm/kv greeting",
    )  # fmt: skip
    add_pool(remove)
    remove.add_argument("keys", nargs="+", metavar="KEY", help=KEY_HELP)
    add_namespace(remove)


def run_list(options: argparse.Namespace) -> None:
    with open_pool(options, options.path) as pool:
        page = list_objects(pool, prefix=options.prefix, limit=options.limit)
    for found in page.objects:
        key = key_text(found.key)
        if options.json:
            row = {"key": key, "num_bytes": found.num_bytes, "retention": found.retention}
            line = json.dumps(row)
        else:
            line = f"{key}  {found.num_bytes:>12}  {found.retention}"
        sys.stdout.write(line + "\n")


def run_get(options: argparse.Namespace) -> None:
    with open_pool(options, options.path) as pool:
        key = pool_key(options.key, options.namespace)
        pinned = pool.pin(key)
        if pinned is None:
            raise Failed(f"there is no object {shown(options.key, 80)}")
        with pinned:
            try:
                pinned.verify()
            except ChecksumError as error:
                pinned.close()
                Store(pool).remove_damaged(key)
                raise Failed(f"{error}; it was removed") from None
            if options.file == "-":
                sys.stdout.buffer.write(pinned.view)
                sys.stdout.buffer.flush()
            else:
                Path(options.file).write_bytes(pinned.view)


def run_put(options: argparse.Namespace) -> None:
    key = store_key(options.key)
    with open_pool(options, options.path) as pool:
        value = _read(options.file, pool.stats().capacity_bytes + 1)  # one too many is refused
        store = Store(pool, namespace=options.namespace)
        result = store.put(key, value, retention=options.retention)
    if result is not PutResult.STORED:
        raise Failed(f"{shown(options.key, 80)} was not stored: {REASONS[result]}")


def _read(file: str, most: int) -> bytes:
    """The bytes of a file, or of standard input: no more than that many."""
    with contextlib.ExitStack() as stack:
        stream = sys.stdin.buffer if file == "-" else stack.enter_context(Path(file).open("rb"))
        parts = []
        while most and (part := stream.read(min(most, PART_BYTES))):
            parts.append(part)
            most -= len(part)
    return b"".join(parts)


def run_remove(options: argparse.Namespace) -> None:
    keys = {text: pool_key(text, options.namespace) for text in options.keys}
    with open_pool(options, options.path) as pool:
        missing = [text for text, key in keys.items() if not pool.remove(key)]
    if missing:
        raise Failed(f"there is no object {', '.join(shown(key, 80) for key in missing)}")
