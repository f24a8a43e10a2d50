"""Arguments shared by several commands."""

import argparse
import re
from typing import Any

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import Key, ObjectPool
from mooncake_kernels.private_files import first_line

from ..keyspace import NUM_DIGITS, Keyspace, StoreKey, parse_key


class Failed(Exception):
    """The command was understood but failed; the message says why."""


UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
KEY_HELP = (
    "a name; 0x and up to 16 hexadecimal digits: a prefix hash; 0x and 32 of them: a key as list "
    "shows it, of any namespace"
)


def add_command(commands: Any, name: str, run: Any, summary: str, example: str) -> Any:
    """Declare a command with its help."""
    parser = commands.add_parser(
        name,
        help=summary,
        description=summary,
        epilog=f"example: mooncake-store {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_pool(parser: Any) -> None:
    """``PATH`` of a pool, and who is trusted with it."""
    parser.add_argument("path", metavar="PATH", help="file of the pool, as /dev/shm/kv")
    add_trust(parser)


def add_trust(parser: Any) -> None:
    """``--owner`` and ``--group`` of a pool's file."""
    parser.add_argument(
        "--owner", type=_id_or_name, metavar="USER",
        help="whose the pool's file is (default: this process's user)",
    )  # fmt: skip
    parser.add_argument(
        "--group", type=_id_or_name, metavar="GROUP",
        help="whose members may write the pool, too (default: no one may)",
    )  # fmt: skip


def open_pool(options: argparse.Namespace, path: str) -> ObjectPool:
    """Open the pool of those who are trusted."""
    return ObjectPool.open(path, owner=options.owner, group=options.group)


def add_namespace(parser: Any) -> None:
    """``--namespace`` of keys."""
    parser.add_argument(
        "--namespace", default="", metavar="NAME", help="of the keys (default: the empty one)"
    )


def add_token(parser: Any) -> None:
    """``--token-file`` of an admin server."""
    parser.add_argument(
        "--token-file", type=_token, dest="token", metavar="FILE",
        help="whose first line is the admin server's token (default: the environment's "
        "MOONCAKE_KERNELS_ADMIN_TOKEN, or else what serve has saved for this user and port)",
    )  # fmt: skip


def as_bytes(text: str) -> int:
    """Parse a size: 4096, 64KiB, 1.5G; units are powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.lower())
    try:
        size = int(float(match[1]) * UNITS[match[2]]) if match else 0
    except OverflowError:
        size = 0
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"a size must be like 4096, 64KiB or 1.5G, in units up to TiB, got {text!r:.80}"
        )
    return size


def as_seconds(text: str) -> float:
    """Parse a time."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.01 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"must be seconds from 0.01 to 3600, got {text!r}")
    return seconds


def as_count(text: str) -> int:
    """Parse a count of at least one."""
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be an integer from 1 on, got {text!r}")
    return int(text)


def pool_key(text: str, namespace: str) -> Key:
    """Parse ``KEY``, see ``KEY_HELP``."""
    digits = text.removeprefix("0x")
    if digits != text and len(digits) == NUM_DIGITS:
        return parse_key("mooncake-store", text)
    return Keyspace(namespace).key(store_key(text))


def store_key(text: str) -> StoreKey:
    """Parse ``KEY``, only as a key of the namespace."""
    if not text.startswith("0x"):
        return text
    if not re.fullmatch("0x[0-9a-fA-F]{1,16}", text):
        raise InvalidArgument(
            f"mooncake-store: KEY must be a name, or 0x and up to 16 hexadecimal digits, got {text}"
        )
    return int(text, 16)


def _id_or_name(text: str) -> int | str:
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else text


def _token(path: str) -> str:
    try:
        return first_line(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error}") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"token: {error}") from None
