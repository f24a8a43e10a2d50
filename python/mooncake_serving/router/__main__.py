"""``python -m mooncake_serving.router --config router.toml``: serve requests by engines."""

import argparse
import logging
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake_kernels.command_line import run_command

if TYPE_CHECKING:
    from .config import RouterConfig

COMMAND = "python -m mooncake_serving.router"


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return run_command(lambda: run(arguments), extra="router")


def run(arguments: list[str] | None) -> int:
    """The same, with what it raises."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description="Place requests on engines, and answer as an OpenAI server."
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="router.toml")
    parser.add_argument("--check", action="store_true", help="only check the configuration")
    options = parser.parse_args(arguments)

    from mooncake_kernels.http_server import listen

    from .config import load_config

    config = load_config(options.config)
    if options.check:
        sys.stdout.write(f"{options.config}: {len(config.instances)} instances\n")
        return 0
    with listen("router", config.host, config.port) as listening:
        serve(config, listening)
    return 0


def serve(config: "RouterConfig", listening: socket.socket) -> None:
    """Serve at a listening socket until the process is told to end."""
    from mooncake_kernels.http_server import is_loopback, silence_uvicorn
    from mooncake_serving.http_api import make_server, raise_file_limit

    from .app import make_app

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    silence_uvicorn()
    raise_file_limit()
    app = make_app(config)
    address = listening.getsockname()
    host, port = address[:2]
    sys.stdout.write(f"router: http://{host}:{port} for {len(config.instances)} instances\n")
    sys.stdout.flush()
    if not config.api_keys and not is_loopback(address):
        logging.warning("whoever reaches %s:%d may use it: there is no api_keys_file", host, port)
    make_server(app, listening, config.client_s).run(sockets=[listening])


if __name__ == "__main__":
    sys.exit(main())
