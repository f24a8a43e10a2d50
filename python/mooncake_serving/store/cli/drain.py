"""``drain``: ask a node's admin server to move the node's objects elsewhere, and to leave."""

import argparse
import json
import sys
import time
from typing import Any
from urllib.parse import quote

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.metadata.url import without_secrets

from .admin_client import SCHEMES, AdminClient
from .options import Failed, add_command, add_token

POLL_S = 0.2


def add_commands(commands: Any) -> None:
    """Declare the command."""
    parser = add_command(
        commands, "drain", run,
        "Move elsewhere what a node of a cluster has, in memory and on a disk; then it leaves. "
        "What only the disk has goes where there is free room. If something could not be moved, "
        "the node stays.",
        "drain http://127.0.0.1:9410 10.0.0.2:4711 --wait",
    )  # fmt: skip
    parser.add_argument("url", metavar="URL", help="of the node's admin server")
    parser.add_argument("node", metavar="NODE", help="name of the node")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--wait", action="store_true", help="until it is done")
    how.add_argument(
        "--cancel", action="store_true", help="stop, or give up: it stays, and takes objects again"
    )
    parser.add_argument(
        "--leave-disk", action="store_true",
        help="do not move what only the disk has: for a node that comes back with it",
    )  # fmt: skip
    add_token(parser)


def run(options: argparse.Namespace) -> None:
    if not options.url.startswith(SCHEMES):
        raise InvalidArgument(
            f"drain: URL must be an http address, got {without_secrets(options.url)}"
        )
    client = AdminClient(options.url, options.token)
    if options.cancel:
        if options.leave_disk:
            raise InvalidArgument("drain: --leave-disk must not be given with --cancel")
        _cancel(client, options)
        return
    wanted = {"node": options.node, "leave_disk": options.leave_disk}
    client.request("/drain", json.dumps(wanted).encode())
    while options.wait:
        progress = _progress(client)
        if progress["state"] == "left":
            if progress["num_on_disk"]:
                sys.stdout.write(f"left on the disk: {progress['num_on_disk']} objects\n")
            return
        if progress["state"] == "idle":
            raise Failed(f"{options.node} was not drained: it was told to stay meanwhile")
        if progress["state"] != "draining":
            reason = progress["error"] or f"{progress['num_failed']} objects could not be moved"
            if progress["num_on_disk"] and not options.leave_disk:
                reason += f"; only its disk has {progress['num_on_disk']} (see --leave-disk)"
            raise Failed(
                f"{options.node} was not drained: {reason}; it takes no new objects until "
                "it is told to drain --cancel"
            )
        time.sleep(POLL_S)


def _cancel(client: AdminClient, options: argparse.Namespace) -> None:
    """Wait until the node takes objects again: it finishes its current batch before."""
    client.request(f"/drain?node={quote(options.node, safe='')}", method="DELETE")
    while not (progress := _progress(client))["is_accepting"]:
        if progress["state"] == "left":
            raise Failed(f"{options.node} has left")
        time.sleep(POLL_S)


def _progress(client: AdminClient) -> dict[str, Any]:
    """What ``GET /drain`` answers."""
    try:
        status = json.loads(client.request("/drain"))
        names = ("state", "error", "num_failed", "num_on_disk", "is_accepting")
        return {name: status[name] for name in names}
    except (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError):
        raise client.is_none("it does not tell how far it has drained") from None
