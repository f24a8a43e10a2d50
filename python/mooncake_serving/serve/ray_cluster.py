"""``serve up --cluster ray``: engines on the nodes of a Ray cluster, the router on this machine."""

import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import ray
from ray.exceptions import RayError

from mooncake_kernels.http_server import in_url, listen
from mooncake_kernels.private_files import write_private

from .children import Child, Port
from .cluster import BACKOFF_S, EVENTS, LOOK_S, OP, PROBE_S, SECRET_FILE, LocalCluster, Server

logger = logging.getLogger(__name__)

KILL_S = 1.0  # in which an actor kills its process, or is killed with it
MOST_INSTANCES = 64
LOOPBACK = "127.0.0.2"  # Ray takes 127.0.0.1 for the address by which others reach this machine
SECRET = "MOONCAKE_KERNELS_SECRET"


class EngineActor:
    """Runs the process of one engine on the node where Ray has placed this actor.

    Args:
        name: of the engine.
        arguments: of ``serve``, but for addresses: all listen on the node's.
        secret: of the cluster.
    """

    def __init__(self, name: str, arguments: Sequence[str], secret: str):
        host = ray.util.get_node_ip_address()
        port = Port(OP, host, 0)
        events = dict(zip(EVENTS, _free_endpoints(host, len(EVENTS)), strict=True))
        self._place = {"url": port.url} | {option[2:]: at for option, at in events.items()}
        environment = {k: v for k, v in os.environ.items() if k != SECRET_FILE} | {SECRET: secret}
        more = [f"--handoff-host={host}", *map("=".join, events.items())]
        self._child = Child(name, [*arguments, *more], port, environment, sys.stderr)

    def place(self) -> dict[str, str]:
        """Return its addresses, as the router's ``/register`` calls them."""
        return self._place

    def wait(self) -> str:
        """Wait until the process has ended, and return how."""
        while (how := self._child.poll()) is None:
            time.sleep(LOOK_S)
        return how

    def terminate(self) -> None:
        """Tell the process to end."""
        self._child.terminate()

    def kill(self) -> None:
        """End the process at once."""
        self._child.kill()


class RayProcess:
    """The process of an engine in an actor, which may still wait for a place on a node.

    Args:
        name, arguments, secret: see ``EngineActor``.
        num_cpus, num_gpus: that Ray reserves for it.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], secret: str, num_cpus: int, num_gpus: float
    ):
        options: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        # It is told to end while another of its threads waits for that.
        options |= {"scheduling_strategy": "SPREAD", "max_concurrency": 2}
        self._actor = ray.remote(EngineActor).options(**options).remote(name, arguments, secret)
        self._placed, self._end = self._actor.place.remote(), self._actor.wait.remote()
        self._place: dict[str, str] = {}

    @property
    def place(self) -> dict[str, str]:
        """Return its addresses; empty: not known yet, or it is dead."""
        if not self._place and _is_there(self._placed):
            try:
                self._place = ray.get(self._placed)
            except RayError:
                return {}  # ``poll`` says why
        return self._place

    @property
    def url(self) -> str:
        """Return where it listens; "": that is not known yet."""
        return self.place.get("url", "")

    def poll(self) -> str | None:
        """Return how it has ended; None: it has not."""
        if not _is_there(self._end):
            return None
        try:
            how: str = ray.get(self._end)
            return how
        except RayError as error:
            told = " ".join(str(error).split())
            return f"was lost with its actor ({type(error).__name__}: {told:.400})"

    def terminate(self) -> None:
        """Tell it to end."""
        self._actor.terminate.remote()

    def kill(self) -> None:
        """End it and its actor at once. Idempotent."""
        if _is_there(self._placed) and not _is_there(self._end):
            ray.wait([self._actor.kill.remote()], timeout=KILL_S)
        ray.kill(self._actor)


class RayCluster(LocalCluster):
    """The same as ``LocalCluster`` with its engines on the nodes of a Ray cluster.

    Ray spreads them over nodes. An engine that dies, also by its node, is started again wherever
    there is a place. The router, on this machine, is told each engine's address.

    Args:
        roles, engine_arguments: see ``LocalCluster``; paths are those of the nodes.
        address: of the Ray cluster, of which this machine is a node; None: one on this machine
            alone, which ends with this object.
        num_cpus, num_gpus: that Ray reserves for each engine.
        others: see ``LocalCluster``.

    Raises:
        ConnectionError: there is no such Ray cluster.
        InvalidArgument: see ``LocalCluster``.
    """

    def __init__(
        self,
        roles: Mapping[str, str],
        engine_arguments: Mapping[str, Sequence[str]],
        *,
        address: str | None,
        num_cpus: int,
        num_gpus: float,
        **others: Any,
    ):
        self._roles, self._resources = roles, (num_cpus, num_gpus)
        self._admin_key = secrets.token_urlsafe()
        self._known: dict[str, dict[str, str]] = {}  # places that the router has been told
        self._router_number = 0  # which of the routers, one after the other, has been
        self._tell_s = 0.0
        needed = (num_cpus * len(roles), num_gpus * len(roles))
        _connect(address, needed[0])
        found = ray.cluster_resources()
        for what, count in zip(("CPU", "GPU"), needed, strict=True):
            if count > found.get(what, 0):
                logger.warning(
                    "Ray has %g %ss and the engines need %g: some wait until there are more",
                    found.get(what, 0), what, count,
                )  # fmt: skip
        super().__init__(roles, engine_arguments, **others)

    def close(self) -> None:
        """End all processes, and leave the Ray cluster. Idempotent."""
        try:
            super().close()
        finally:
            ray.shutdown()

    def _add_engine(self, name: str, arguments: Sequence[str]) -> None:
        secret = self._environment.get(SECRET)
        if not secret:
            content = Path(self._environment[SECRET_FILE]).expanduser().read_bytes()
            secret = os.fsdecode(content.rstrip(b"\r\n"))
        start = partial(RayProcess, name, arguments, secret, *self._resources)
        self.servers[name] = Server(name, start)

    def _engines_of_router(self, roles: Mapping[str, str]) -> list[str]:
        keys = self._folder / "admin-keys"
        write_private(keys, self._admin_key)
        most = max(MOST_INSTANCES, len(roles))
        return [f'admin_keys_file = "{keys}"', f"max_instances = {most}"]

    def _tell_router(self) -> None:
        """Have the router know the engines that are there, where they are now."""
        if time.monotonic() < self._tell_s:
            return
        number = self.servers["router"].num_restarts
        if number != self._router_number:  # it knows none
            self._router_number, self._known = number, {}
        try:
            for name, role in self._roles.items():
                child = self.servers[name].child
                place = child.place if isinstance(child, RayProcess) else {}
                if name in self._known and self._known[name] != place:
                    self._ask("unregister", {"name": name, "drain_s": 0})
                    del self._known[name]
                if place and name not in self._known:
                    self._ask("register", {"name": name, "role": role, **place})
                    self._known[name] = place
        except httpx.TransportError:  # the router is not up
            self._tell_s = time.monotonic() + BACKOFF_S
        except httpx.HTTPStatusError as error:
            self._tell_s = time.monotonic() + BACKOFF_S
            logger.warning("the router refuses: %s", error.response.text)

    def _ask(self, what: str, body: Mapping[str, Any]) -> None:
        answer = httpx.post(
            f"{self.url}/{what}",
            json=body,
            headers={"authorization": f"Bearer {self._admin_key}"},
            timeout=PROBE_S,
            trust_env=False,
        )
        if answer.status_code != 404 or what != "unregister":  # it has left already
            answer.raise_for_status()


def _connect(address: str | None, num_cpus: int) -> None:
    """Connect to a Ray cluster, or start one of this machine with room for so many processors."""
    more: dict[str, Any] = {"logging_level": logging.WARNING}
    if address is None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        more |= {"num_cpus": num_cpus, "include_dashboard": False, "_node_ip_address": LOOPBACK}
        more["_system_config"] = {"worker_niceness": 0}  # it is 15 else, of engines, too
    on_sigterm = signal.getsignal(signal.SIGTERM)
    ray.init(address or "local", **more)
    signal.signal(signal.SIGTERM, on_sigterm)  # which Ray has replaced


def _is_there(result: Any) -> bool:
    """Whether a call of an actor has ended."""
    return bool(ray.wait([result], timeout=0)[0])


def _free_endpoints(host: str, count: int) -> list[str]:
    """Return ZeroMQ endpoints that are free now: should one be taken, the engine starts anew."""
    with ExitStack() as stack:
        taken: list[socket.socket] = [
            stack.enter_context(listen(OP, host, 0)) for _ in range(count)
        ]
        return [f"tcp://{in_url(host)}:{one.getsockname()[1]}" for one in taken]
