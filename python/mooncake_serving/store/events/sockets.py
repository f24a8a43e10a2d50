"""ZeroMQ sockets, with errors that name the argument."""

import errno
import re
from typing import Any

import zmq

from mooncake_kernels.errors import InvalidArgument

MAX_HWM = 2**31 - 1  # an int of C
MAX_PORT = 65_535  # ZeroMQ takes others modulo 65,536
NOT_AN_ENDPOINT = (errno.EINVAL, errno.EPROTONOSUPPORT, errno.ENODEV, errno.ENOENT)


def listening(kind: int, op: str, argument: str, endpoint: Any, hwm: int) -> zmq.Socket[bytes]:
    """Make a socket that others connect to.

    Raises:
        InvalidArgument: it is not a ZeroMQ endpoint.
        OSError: the address is in use, ...
    """
    return _opened(kind, op, argument, endpoint, hwm, zmq.Socket.bind)


def connected(
    kind: int,
    op: str,
    argument: str,
    endpoint: Any,
    hwm: int,
    *,
    ping_s: float = 0,
    gone_s: float = 0,
) -> zmq.Socket[bytes]:
    """Make a socket that connects, and reconnects as often as needed.

    Every ``ping_s`` seconds, unless that is 0, the other side is asked for a sign of life; after
    ``gone_s`` without any the socket connects anew.

    Raises:
        InvalidArgument: it is not a ZeroMQ endpoint.
    """

    def connect(socket: zmq.Socket[bytes], endpoint: str) -> None:
        socket.heartbeat_ivl, socket.heartbeat_timeout = int(ping_s * 1000), int(gone_s * 1000)
        socket.connect(endpoint)

    return _opened(kind, op, argument, endpoint, hwm, connect)


def as_topic(op: str, topic: Any) -> bytes:
    """Encode a topic.

    Raises:
        InvalidArgument: it is no text.
    """
    try:
        return topic.encode()
    except (AttributeError, UnicodeEncodeError):
        raise InvalidArgument(f"{op}: topic must be a str, got {topic!r:.80}") from None


def endpoint_of(socket: zmq.Socket[bytes]) -> str:
    """Return where a socket listens, with its port."""
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _opened(
    kind: int, op: str, argument: str, endpoint: Any, hwm: int, open_at: Any
) -> zmq.Socket[bytes]:
    if not isinstance(endpoint, str):
        raise InvalidArgument(f"{op}: {argument} must be a str, got {endpoint!r}")
    port = re.search(r":([0-9]+)$", endpoint) if endpoint.startswith("tcp://") else None
    if port is not None and int(port[1][:9]) > MAX_PORT:
        raise InvalidArgument(
            f"{op}: {argument} must have a port from 0 to {MAX_PORT}, got {endpoint!r:.80}"
        )
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.set_hwm(hwm)
    socket.linger = 0
    socket.ipv6 = endpoint.startswith("tcp://[")
    try:
        open_at(socket, endpoint)
    except zmq.ZMQError as error:
        socket.close()
        if error.errno in NOT_AN_ENDPOINT:
            raise InvalidArgument(
                f"{op}: {argument} must be an endpoint like tcp://127.0.0.1:5557, "
                f"got {endpoint!r:.80} ({error.strerror})"
            ) from None
        raise OSError(error.errno, f"{op}: {argument} {endpoint}: {error.strerror}") from None
    return socket
