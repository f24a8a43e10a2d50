"""Translate the strings of ``initialize`` and the environment for this engine."""

import dataclasses
import ipaddress
import os
from collections.abc import Mapping
from urllib.parse import urlencode, urlsplit

import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.metadata.url import without_secrets

from .codes import log

_P2P = "P2PHANDSHAKE"
_SERVERS = ("redis", "rediss", "http", "https")
_TRANSPORTS = {  # the transports that a protocol allows an engine to use
    "tcp": ("local", "shm", "cuda_ipc", "tcp"),
    "rdma": ("local", "shm", "cuda_ipc", "rdma"),
}
_MIN_TIMEOUT_S = 5  # Mooncake's; lower settings count as this


def check_text(argument: str, value: str) -> None:
    """Refuse anything but a string."""
    if not isinstance(value, str):
        raise InvalidArgument(f"{argument} must be a string, got {value!r:.80}")


def listen_name(local_hostname: str) -> str:
    """The engine's ``"host:port"`` for ``"host"``, ``"host:port"`` or an IPv6 address."""
    check_text("local_hostname", local_hostname)
    if _is_ipv6(local_hostname):
        return f"[{local_hostname}]:0"
    has_port = ":" in local_hostname.rpartition("]")[2]
    return local_hostname if has_port else f"{local_hostname}:0"


def peer_name(name: str, metadata: str, argument: str) -> str:
    """The name of a peer's engine: with a metadata server, what the ``argument`` says.

    Otherwise its ``"host:port"``; an IPv6 address may come without its brackets.
    """
    check_text(argument, name)
    if metadata != "p2p":
        return name
    host, _, port = name.rpartition(":")
    return f"[{host}]:{port}" if _is_ipv6(host) else name


def metadata_of(server: str, kind: str = "etcd", environ: Mapping[str, str] = os.environ) -> str:
    """Our ``metadata`` for Mooncake's server; ``kind`` is the kind of a server without ``kind://``.

    ``MC_METADATA_CLUSTER_ID`` is a part of all keys; ``MC_REDIS_USERNAME``, ``MC_REDIS_PASSWORD``
    and ``MC_REDIS_DB_INDEX`` supply what the URL does not specify.
    """
    check_text("metadata_server", server)
    if server == _P2P:
        return "p2p"
    check_text("metadata_type", kind)
    url = server if "://" in server else f"{kind}://{server}"
    scheme = url.partition("://")[0]
    if scheme not in _SERVERS:
        why = f"for there is no client of {scheme} here, got {without_secrets(url)}"
        raise Unavailable(
            f'metadata_server must be "{_P2P}", redis://host:port or http://host:port/metadata, '
            f"{why if server else 'got nothing'}"
        )
    added = {"prefix": _prefix(environ)} | (_redis_login(url, environ) if "redis" in scheme else {})
    query = urlencode({name: value for name, value in added.items() if value})
    return f"{url}{'&' if '?' in url else '?'}{query}" if query else url


def _prefix(environ: Mapping[str, str]) -> str:
    cluster = environ.get("MC_METADATA_CLUSTER_ID", "")
    return f"mooncake/{cluster.removesuffix('/')}/" if cluster else ""


def _redis_login(url: str, environ: Mapping[str, str]) -> dict[str, str]:
    try:
        parts = urlsplit(url)
    except ValueError:  # the engine refuses it in its own words
        return {}
    login = {} if "@" in parts.netloc else {"username": "USERNAME", "password": "PASSWORD"}
    login |= {} if parts.path.strip("/") else {"db": "DB_INDEX"}
    return {option: environ.get(f"MC_REDIS_{name}", "") for option, name in login.items()}


def transports_of(protocol: str) -> tuple[str, ...]:
    """The transports of a protocol. ``MC_FORCE_TCP``, whatever its value, makes it tcp."""
    check_text("protocol", protocol)
    if "MC_FORCE_TCP" in os.environ and protocol != "tcp":
        log.info("MC_FORCE_TCP is set: tcp instead of %s", protocol)
        return _TRANSPORTS["tcp"]
    if protocol in _TRANSPORTS:
        return _TRANSPORTS[protocol]
    raise Unavailable(
        f"protocol must be one of {', '.join(_TRANSPORTS)} for now, got {protocol!r}; "
        "MC_FORCE_TCP=1 makes any protocol tcp"
    )


def topology_of(device_name: str | None, transports: tuple[str, ...]) -> mk.Topology | None:
    """This machine with only the named NICs, separated by commas; None: with all of them."""
    if device_name is not None:
        check_text("device_name", device_name)
    wanted = {name.strip() for name in (device_name or "").split(",")} - {""}
    if not wanted:
        return None
    if "rdma" not in transports:
        log.info("tcp uses no device, not %s", device_name)
        return None
    system = mk.Topology.discover().with_visible_gpus().system
    kept = tuple(nic for nic in system.nics if nic.name in wanted)
    if len(kept) < len(wanted):
        raise InvalidArgument(
            "device_name must be RDMA devices of this machine, separated by commas, of which it "
            f"has {[nic.name for nic in system.nics]}, got {device_name!r:.80}"
        )
    return mk.Topology(dataclasses.replace(system, nics=kept))


def timeout_s() -> float:
    """``MC_TRANSFER_TIMEOUT``: seconds that a transfer may take, in addition to 1 ns a byte."""
    text = os.environ.get("MC_TRANSFER_TIMEOUT", "30")
    if not text.isdecimal():
        raise InvalidArgument(f"MC_TRANSFER_TIMEOUT must be whole seconds, got {text!r}")
    return float(max(int(text), _MIN_TIMEOUT_S))


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
