"""How engines are named and found: by address, or by a metadata server."""

import ipaddress
import os
import re
import secrets
import socket
from dataclasses import dataclass
from typing import Any

from .. import _host, config, metadata
from ..errors import FailureKind, InvalidArgument, TransferError, Unavailable
from .arguments import as_address
from .nics import NicChoice
from .security import Trust

PROBE_S = 2.0  # for an engine to answer when another one wants its name


@dataclass(frozen=True)
class Options:
    """What an engine is created with, apart from its name and where it listens."""

    transports: tuple[str, ...]
    nics: NicChoice
    trust: Trust
    max_connections: int
    spin_us: int

    def make_engine(self, name: str, listen: str) -> _host.TransferEngine:
        """Make the host's engine, with this name or, if it is empty, named by its address."""
        settings = config.current()
        return _host.TransferEngine(
            name,
            listen,
            local="local" in self.transports,
            shm="shm" in self.transports,
            cuda_ipc="cuda_ipc" in self.transports,
            tcp="tcp" in self.transports,
            nics=list(self.nics.nics),
            near_nodes=list(self.nics.near_nodes),
            near_gpus=list(self.nics.near_gpus),
            nics_required=self.nics.required,
            file="file" in self.transports,
            packets=(
                settings.rdma_gid_index,
                settings.rdma_traffic_class,
                settings.rdma_service_level,
            ),
            num_lanes=settings.transfer_lanes,
            max_connections=self.max_connections,
            spin_us=self.spin_us,
            secret=self.trust.secret,
            secret_only=self.trust.secret_only,
            tls=self.trust.tls,
            local_users=list(self.trust.local_users),
            reached_at=list(self.trust.reached_at),
        )


class Names:
    """Publishes an engine under its name until closed, and opens others by name."""

    def __init__(self, url: Any):
        self._metadata = metadata.choose("TransferEngine", "metadata", url)
        self._publication: metadata.Publication | None = None
        self._pid = os.getpid()

    def start(self, name: Any, listen: Any, options: Options) -> _host.TransferEngine:
        """Make the engine and publish it."""
        if isinstance(self._metadata, metadata.P2P):
            if listen is not None:
                raise InvalidArgument(
                    f"TransferEngine: listen must be None under p2p, where name is it, "
                    f"got {listen!r}"
                )
            engine = options.make_engine("", address_or_free("name", name))
        else:
            if not {"tcp", "rdma"} & set(options.transports):
                raise InvalidArgument(
                    "TransferEngine: transports must have tcp or rdma with a metadata server, "
                    f"got {', '.join(options.transports)}"
                )
            name = made_up_name() if name is None else name
            self._metadata.check_name("TransferEngine", name)
            engine = options.make_engine(name, address_or_free("listen", listen))
        try:
            self._publication = self._metadata.publish(
                own_entry(engine), lambda holder: is_gone(engine, holder)
            )
        except BaseException:
            engine.close()
            self._metadata.close()
            raise
        return engine

    def open(
        self, engine: _host.TransferEngine, name: Any, deadline_s: float
    ) -> _host.TransferPeer:
        """Look an engine up and connect to it, never to another one that now has its address."""
        engine.check_process("open")
        name = self._metadata.check_name("open", name)
        entry = self._metadata.lookup(name)
        if entry is None:
            raise TransferError(
                name,
                f"{self._metadata.url} has no such name, or its time to live is over",
                kind=FailureKind.GONE,
            )
        if entry.protocol != metadata.PROTOCOL:
            raise TransferError(
                name,
                f"{entry.address} speaks {entry.protocol or 'a protocol'} of Mooncake",
                kind=FailureKind.INCOMPATIBLE,
            )
        try:
            return engine.open(name, entry.address, entry.instance, deadline_s)
        except TransferError as error:
            if entry.instance == 0:  # p2p: the name was the address
                raise
            cause = f"{error.cause}, {self._doubt(entry, error.kind)}"
            raise TransferError(name, cause, kind=error.kind) from None

    def close(self) -> None:
        """Withdraw the name. Idempotent; without effect in a forked child."""
        if os.getpid() != self._pid:
            return
        if self._publication is not None:
            self._publication.close()
        self._metadata.close()

    def _doubt(self, entry: metadata.Entry, kind: FailureKind) -> str:
        where = f"at {entry.address}, as {self._metadata.url} says"
        if is_elsewhere(entry):
            return f"{where}: an address within {entry.host}; it should listen to other machines"
        return f"{where}: its entry is stale" if kind is FailureKind.GONE else where


def is_gone(engine: _host.TransferEngine, holder: metadata.Entry) -> bool:
    """Whether the engine of an entry is certainly gone.

    An engine that does not answer may be slow. A refused connection proves something only on the
    engine's own machine: others may be behind a firewall, or use the same private addresses.
    """
    if holder.protocol != metadata.PROTOCOL or holder.host != socket.gethostname():
        return False
    try:
        peer = engine.open(holder.name, holder.address, holder.instance, PROBE_S)
    except TransferError as error:
        return error.kind is FailureKind.GONE
    except Unavailable:
        return False
    engine.close_peer(peer)
    return False


def is_elsewhere(entry: metadata.Entry) -> bool:
    """Whether its address is a loopback address of another machine."""
    host = entry.address.rpartition(":")[0].strip("[]")
    try:
        loops_back = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loops_back = host == "localhost"
    return loops_back and entry.host != socket.gethostname()


def own_entry(engine: _host.TransferEngine) -> metadata.Entry:
    """The entry published for an engine of this process."""
    from .. import __version__

    return metadata.Entry(
        engine.name,
        engine.address,
        metadata.PROTOCOL,
        engine.instance,
        __version__,
        socket.gethostname(),
        os.getpid(),
    )


def made_up_name() -> str:
    """A name that no other engine has."""
    return f"{re.sub('[^A-Za-z0-9.-]', '', socket.gethostname())[:200]}-{secrets.token_hex(8)}"


def address_or_free(argument: str, value: Any) -> str:
    """Where an engine listens; by default, at a free port."""
    if value is not None:
        return as_address("TransferEngine", argument, value)
    host = config.current().listen_host
    return f"[{host}]:0" if ":" in host else f"{host}:0"
