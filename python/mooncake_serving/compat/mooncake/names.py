"""What the strings of ``initialize`` and the environment mean to this engine."""

import ipaddress
import os
from collections.abc import Mapping

from mooncake_kernels.errors import InvalidArgument, Unavailable

from .codes import log

_P2P = "P2PHANDSHAKE"
_TRANSPORTS = {"tcp": ("local", "shm", "tcp")}  # what a protocol allows an engine to use
_MIN_TIMEOUT_S = 5  # Mooncake's; what is set to less counts as this


def listen_name(local_hostname: str) -> str:
    """The engine's ``"host:port"`` for ``"host"``, ``"host:port"`` or an address of IPv6."""
    _check_text("local_hostname", local_hostname)
    if _is_ipv6(local_hostname):
        return f"[{local_hostname}]:0"
    has_port = ":" in local_hostname.rpartition("]")[2]
    return local_hostname if has_port else f"{local_hostname}:0"


def peer_name(target_hostname: str) -> str:
    """The peer's ``"host:port"``; an address of IPv6 may come without its brackets."""
    _check_text("target_hostname", target_hostname)
    host, _, port = target_hostname.rpartition(":")
    return f"[{host}]:{port}" if _is_ipv6(host) else target_hostname


def metadata_of(server: str, kind: str = "etcd") -> str:
    """Our ``metadata`` for Mooncake's server; ``kind`` is that of one without ``kind://``."""
    _check_text("metadata_server", server)
    if server == _P2P:
        return "p2p"
    url = server if "://" in server else f"{kind}://{server}"
    raise Unavailable(f'metadata_server must be "{_P2P}" for now, got {url}')


def transports_of(protocol: str, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The transports of a protocol. ``MC_FORCE_TCP``, whatever its value, makes it tcp."""
    _check_text("protocol", protocol)
    if protocol in _TRANSPORTS:
        return _TRANSPORTS[protocol]
    if "MC_FORCE_TCP" in environ:
        log.info("MC_FORCE_TCP is set: tcp in the place of %s", protocol)
        return _TRANSPORTS["tcp"]
    raise Unavailable(
        f"protocol must be one of {', '.join(_TRANSPORTS)} for now, got {protocol!r}; "
        "MC_FORCE_TCP=1 makes any protocol tcp"
    )


def timeout_s(environ: Mapping[str, str] = os.environ) -> float:
    """``MC_TRANSFER_TIMEOUT``: seconds that a transfer may take, beside 1 ns a byte."""
    text = environ.get("MC_TRANSFER_TIMEOUT", "30")
    if not text.isdecimal():
        raise InvalidArgument(f"MC_TRANSFER_TIMEOUT must be whole seconds, got {text!r}")
    return float(max(int(text), _MIN_TIMEOUT_S))


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _check_text(argument: str, value: str) -> None:
    if not isinstance(value, str):
        raise InvalidArgument(f"{argument} must be a string, got {value!r:.80}")
