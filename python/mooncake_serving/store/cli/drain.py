"""``drain``: ask a node's admin server to move the node's objects elsewhere, and to leave."""

import argparse
import json
import time
from typing import Any

from .failure import Failed
from .options import add_command, add_token
from .sample import request

POLL_S = 0.2


def add_commands(commands: Any) -> None:
    """Declare the command."""
    parser = add_command(
        commands, "drain", run, "Move elsewhere what a node of a cluster has; then it leaves.",
        "drain http://127.0.0.1:9410 10.0.0.2:4711 --wait",
    )  # fmt: skip
    parser.add_argument("url", metavar="URL", help="of the node's admin server")
    parser.add_argument("node", metavar="NODE", help="name of the node")
    parser.add_argument("--wait", action="store_true", help="until it is done")
    add_token(parser)


def run(options: argparse.Namespace) -> None:
    url = f"{options.url.rstrip('/')}/drain"
    request(url, options.token, json.dumps({"node": options.node}).encode())
    while options.wait:
        progress = json.loads(request(url, options.token))
        if progress["state"] == "left":
            return
        if progress["state"] != "draining":
            reason = progress["error"] or f"{progress['num_failed']} objects could not be moved"
            raise Failed(f"{options.node} was not drained: {reason}")
        time.sleep(POLL_S)
