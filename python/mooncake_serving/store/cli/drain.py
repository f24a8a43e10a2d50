"""``drain``: ask a node's admin server to move elsewhere what a member has."""

import argparse
import json
from typing import Any

from .options import add_command, add_token
from .sample import request


def add_commands(commands: Any) -> None:
    """Declare the command."""
    parser = add_command(
        commands, "drain", run, "Move elsewhere what a member of the cluster has.",
        "drain http://127.0.0.1:9410 10.0.0.2:4711",
    )  # fmt: skip
    parser.add_argument("url", metavar="URL", help="of an admin server of the cluster")
    parser.add_argument("node", metavar="NODE", help="name of the member")
    add_token(parser)


def run(options: argparse.Namespace) -> None:
    body = json.dumps({"node": options.node}).encode()
    request(f"{options.url.rstrip('/')}/drain", options.token, body)
