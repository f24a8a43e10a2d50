"""``serve router``: the router, started by hand or by ``serve up``."""

import argparse
import socket

from mooncake_serving.router.__main__ import run as run_router
from mooncake_serving.router.__main__ import serve
from mooncake_serving.router.config import load_config

from .children import end_with_stdin


def run(options: argparse.Namespace) -> int:
    """Serve until the process is told to end; returns the exit status."""
    if options.until_stdin_closes:
        end_with_stdin()
    if options.fd is None:
        return run_router(["--config", options.config])
    config = load_config(options.config)
    with socket.socket(fileno=options.fd) as listening:
        serve(config, listening)
    return 0
