"""Engines and the router as processes of this machine, which are restarted when they die."""

import json
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TextIO

import httpx
import msgspec

from mooncake_kernels import config
from mooncake_kernels.closeable import Closeable
from mooncake_kernels.private_files import write_private

from .children import Child, Port

logger = logging.getLogger(__name__)

LOOK_S = 0.1
PROBE_S = 5.0
BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
STABLE_S = 60.0  # after which a server that dies is restarted after BACKOFF_S again
CLOSE_S = 5.0  # in which servers end by themselves
OP = "serve up"


class StartFailed(RuntimeError):
    """A process has ended before the cluster was ready."""


class Process(Protocol):
    """A process of a server, on this machine as ``Child``, or on another one."""

    @property
    def url(self) -> str:
        """Return where it listens, or will; "": that is not known yet."""

    def poll(self) -> str | None:
        """Return how it has ended; None: it has not."""

    def terminate(self) -> None:
        """Tell it to end."""

    def kill(self) -> None:
        """End it at once, with all that was kept for it. Idempotent."""


@dataclass(eq=False)
class Server:
    """A server of the cluster, which one process after the other is.

    Attributes:
        name: for people; unique.
        start: starts a process.
        child: its process; None: it has died, and is to be restarted.
        started_s: when that was started, by the monotonic clock.
        restart_s: when it is to be restarted.
        num_restarts: so far.
        backoff_s: before the next one.
    """

    name: str
    start: Callable[[], Process]
    child: Process | None = None
    started_s: float = 0.0
    restart_s: float = 0.0
    num_restarts: int = 0
    backoff_s: float = field(default=BACKOFF_S)


class LocalCluster(Closeable):
    """Starts the processes of a cluster, and restarts them; close it, which ends them all.

    They end also when this process dies. A restarted one has its port again, so the router finds
    it. Not thread-safe.

    Args:
        roles: of the engines, by their names: "prefill", "decode" or "both".
        engine_arguments: of ``serve engine``, by the role.
        host, port: of the router; port 0: a free one.
        block_size: tokens of an engine's block.
        admission: entries of the router's ``[admission]``; ``classes`` has tables by their names.
        output: where the processes' lines go.

    Attributes:
        servers: the engines and the router, by their names.
        url: of the router.

    Raises:
        InvalidArgument: the port is taken, or there is no such host.
    """

    def __init__(
        self,
        roles: Mapping[str, str],
        engine_arguments: Mapping[str, Sequence[str]],
        *,
        host: str,
        port: int,
        block_size: int,
        admission: Mapping[str, Any],
        output: TextIO,
    ):
        self._output = output
        self._folder = Path(tempfile.mkdtemp(prefix="mooncake-"))
        self._ports: dict[str, Port] = {}
        self.servers: dict[str, Server] = {}
        self._is_closed = False
        try:
            self._environment = self._secured()
            toml = self._folder / "router.toml"
            self._add_here("router", ["router", "--config", str(toml)], Port(OP, host, port))
            self.url = self._ports["router"].url
            for name, role in roles.items():
                self._add_engine(name, ["engine", f"--role={role}", *engine_arguments[role]])
            toml.write_text(self._router_config(roles, block_size, admission))
            for server in self.servers.values():
                self._start(server)
        except BaseException:
            self.close()
            raise

    def wait_until_ready(self) -> None:
        """Wait until all engines and the router answer.

        Raises:
            StartFailed: a process has ended.
        """
        waiting = dict(self.servers)
        with httpx.Client(timeout=PROBE_S, trust_env=False) as client:
            while waiting:
                for server in self.servers.values():
                    assert server.child is not None, "none has been restarted yet"
                    if (how := server.child.poll()) is not None:
                        raise StartFailed(f"{OP}: {server.name} {how} before it was ready")
                for name, server in [*waiting.items()]:
                    if _is_healthy(client, server):
                        del waiting[name]
                        logger.info("%s is ready", name)
                self._tell_router()
                time.sleep(LOOK_S)

    def supervise(self) -> None:
        """Restart what has died, if it is time for that; to be called again and again."""
        now = time.monotonic()
        for server in self.servers.values():
            if server.child is None:
                if now >= server.restart_s:
                    server.num_restarts += 1
                    self._start(server)
                continue
            how = server.child.poll()
            if how is None:
                continue
            server.child.kill()  # what is left of it: its pipes
            server.child = None
            if now - server.started_s > STABLE_S:
                server.backoff_s = BACKOFF_S
            server.restart_s = now + server.backoff_s
            logger.warning("%s %s: restarted in %g s", server.name, how, server.backoff_s)
            server.backoff_s = min(2 * server.backoff_s, MAX_BACKOFF_S)
        self._tell_router()

    def model(self) -> str:
        """Return the name of the model, as the router tells it."""
        answer = httpx.get(f"{self.url}/v1/models", timeout=PROBE_S, trust_env=False)
        return msgspec.json.decode(answer.content)["data"][0]["id"]

    def event_endpoints(self, name: str) -> tuple[str, str]:
        """Return where an engine publishes its KV events, and where it sends missed ones again."""
        return f"ipc://{self._folder}/{name}-events", f"ipc://{self._folder}/{name}-replay"

    def close(self) -> None:
        """End all processes, by force if they take long. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        children = [one.child for one in self.servers.values() if one.child is not None]
        for child in children:
            child.terminate()
        until = time.monotonic() + CLOSE_S
        try:
            while any(child.poll() is None for child in children) and time.monotonic() < until:
                time.sleep(LOOK_S / 2)
        finally:  # another Ctrl-C: at once
            for child in children:
                child.kill()
            for port in self._ports.values():
                port.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _add_here(self, name: str, arguments: Sequence[str], port: Port) -> None:
        """Add a server that is a process of this machine."""
        self._ports[name] = port

        def start() -> Child:
            return Child(name, arguments, port, self._environment, self._output)

        self.servers[name] = Server(name, start)

    def _add_engine(self, name: str, arguments: Sequence[str]) -> None:
        endpoints = zip(EVENTS, self.event_endpoints(name), strict=True)
        events = [f"{option}={endpoint}" for option, endpoint in endpoints]
        self._add_here(name, [*arguments, *events], Port(OP, "127.0.0.1", 0))

    def _tell_router(self) -> None:
        """Tell the router what has changed of its engines: they keep their ports."""

    def _start(self, server: Server) -> None:
        server.started_s = time.monotonic()
        server.child = server.start()

    def _secured(self) -> dict[str, str]:
        """Return the environment of the processes, with a secret of theirs if there is none."""
        current = config.current()
        if current.secret or current.secret_file:
            return dict(os.environ)
        write_private(self._folder / "secret", secrets.token_hex())
        return {**os.environ, SECRET_FILE: str(self._folder / "secret")}

    def _router_config(
        self, roles: Mapping[str, str], block_size: int, admission: Mapping[str, Any]
    ) -> str:
        """Return router.toml; ``admission`` may have tables by the classes of requests."""
        entries = dict(admission)
        classes = entries.pop("classes", {})
        tables = {"": entries, **{f'.classes."{name}"': of for name, of in classes.items()}}
        lines = ['connector = "mooncake_kernels"', f"block_size = {block_size}", "health_s = 0.5"]
        lines += self._engines_of_router(roles)
        for name, table in tables.items():
            lines += [f"[admission{name}]", *(f"{k} = {json.dumps(v)}" for k, v in table.items())]
        return "\n".join(lines) + "\n"

    def _engines_of_router(self, roles: Mapping[str, str]) -> list[str]:
        """Return the lines of router.toml that say which engines there are."""
        lines = []
        for name, role in roles.items():
            events, replay = self.event_endpoints(name)
            lines += [
                "[[instance]]", f'name = "{name}"', f'role = "{role}"',
                f'url = "{self._ports[name].url}"',
                f'events = "{events}"', f'replay = "{replay}"',
            ]  # fmt: skip
        return lines


EVENTS = ("--events", "--replay")  # options of ``serve engine``
SECRET_FILE = "MOONCAKE_KERNELS_SECRET_FILE"


def _is_healthy(client: httpx.Client, server: Server) -> bool:
    url = server.child.url if server.child is not None else ""
    try:
        return bool(url) and client.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False
