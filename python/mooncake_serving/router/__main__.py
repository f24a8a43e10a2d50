"""``python -m mooncake_serving.router --config router.toml``: serve requests by engines."""

import argparse
import contextlib
import logging
import resource
import socket
import sys
from pathlib import Path

from mooncake_kernels.command_line import run_command

COMMAND = "python -m mooncake_serving.router"
CLOSE_S = 30  # for requests in flight
KEEP_ALIVE_S = 75  # of idle connections of clients
MOST_MS = 2**31 - 1  # an int of C


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

    import uvicorn

    from mooncake_kernels.http_server import is_loopback, listen, resolve, silence_uvicorn

    from .app import make_app
    from .config import load_config

    config = load_config(options.config)
    if options.check:
        sys.stdout.write(f"{options.config}: {len(config.instances)} instances\n")
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    silence_uvicorn()
    raise_file_limit()
    app = make_app(config)
    with listen("router", config.host, config.port) as listening:
        prepare(listening, config.client_s)
        host, port = listening.getsockname()[:2]
        sys.stdout.write(f"router: http://{host}:{port} for {len(config.instances)} instances\n")
        sys.stdout.flush()
        if not config.api_keys and not is_loopback(resolve("router", config.host)[1]):
            logging.warning(
                "whoever reaches %s:%d may use it: there is no api_keys_file", host, port
            )
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_S,
            )
        )
        server.run(sockets=[listening])
    return 0


def raise_file_limit() -> None:
    """Raise the number of open files to what this process may have: a connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # a hard limit that the system does not allow
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def prepare(listening: socket.socket, client_s: float) -> None:
    """Set what the connections of a listening socket inherit.

    They do not wait for an acknowledgement to send more: asyncio sees to that only for sockets
    whose protocol is given, which accepted ones here do not have, and the second write of an answer
    would wait 40 ms for a client that delays its acknowledgements. And they break when a client has
    taken nothing for ``client_s`` seconds: one that is closed still waits for what is not sent.
    """
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    milliseconds = max(1, min(int(client_s * 1000), MOST_MS))
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)


if __name__ == "__main__":
    sys.exit(main())
