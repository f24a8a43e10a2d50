"""Notifications: a message in pieces that our engine takes, and the messages that have arrived.

A piece is ``_HEADER``, the sender's name, and a part of the message. The engine delivers a piece
after the data of its request, so the last piece of a message goes with the data, and the message is
complete only then.
"""

import itertools
import struct
import threading
from collections import OrderedDict
from typing import Any

from mooncake_kernels.transfer import TransferEngine

from .errors import nixlInvalidParamError
from .logging import get_logger

_HEADER = struct.Struct("<8sQIIH")  # magic, message, piece, pieces, bytes of the sender's name
_MAGIC = b"MKNIXLN1"
_MAX_PIECE = 65536  # of the engine
_MAX_MESSAGE = 16 << 20
_MAX_PIECES = 512  # what the largest message needs, however long the sender's name is
_MAX_INCOMPLETE = 64  # messages; a sender that dies in the middle of one leaves it
_log = get_logger(__name__)


class Sender:
    """Cuts an agent's messages into pieces."""

    def __init__(self, name: str):
        self._name = name.encode()
        self._numbers = itertools.count(1)
        self._room = _MAX_PIECE - _HEADER.size - len(self._name)

    def pieces(self, op: str, message: Any) -> list[bytes]:
        """The pieces of a message, in order.

        Raises:
            nixlInvalidParamError: it is no bytes or text, or is larger than 16 MiB.
        """
        data = message.encode() if isinstance(message, str) else message
        if not isinstance(data, bytes | bytearray | memoryview) or len(data) > _MAX_MESSAGE:
            raise nixlInvalidParamError(
                f"{op}: notif_msg must be at most {_MAX_MESSAGE} bytes, got "
                f"{len(data) if isinstance(data, bytes) else type(data).__name__}"
            )
        count = max(1, -(-len(data) // self._room))
        number = next(self._numbers)
        return [
            _HEADER.pack(_MAGIC, number, index, count, len(self._name))
            + self._name
            + bytes(data[index * self._room :][: self._room])
            for index in range(count)
        ]


class Inbox:
    """The messages that an engine has received, by the name of their agent. Thread-safe."""

    def __init__(self, engine: TransferEngine):
        self._engine = engine
        self._lock = threading.Lock()
        self._incomplete: OrderedDict[tuple[str, int], dict[int, bytes]] = OrderedDict()

    def take(self) -> dict[str, list[bytes]]:
        """The messages that are complete and were not taken before, in order of arrival.

        A notification of ``mooncake_kernels``' own API has the name of its engine.
        """
        messages: dict[str, list[bytes]] = {}
        with self._lock:
            for engine_name, data in self._engine.receive_notifications():
                name, message = self._add(engine_name, data)
                if message is not None:
                    messages.setdefault(name, []).append(message)
        return messages

    def _add(self, engine_name: str, data: bytes) -> tuple[str, bytes | None]:
        if not data.startswith(_MAGIC) or len(data) < _HEADER.size:
            return engine_name, data
        _, number, index, count, num_chars = _HEADER.unpack_from(data)
        if not index < count <= _MAX_PIECES:
            return engine_name, data
        begin = _HEADER.size + num_chars
        name = data[_HEADER.size : begin].decode(errors="backslashreplace")
        if count == 1:
            return name, data[begin:]
        key = (engine_name, number)
        pieces = self._incomplete.setdefault(key, {})
        pieces[index] = data[begin:]
        if len(pieces) < count:
            if len(self._incomplete) > _MAX_INCOMPLETE:
                (lost, _), _ = self._incomplete.popitem(last=False)
                _log.warning("a notification of %s never became complete, and is dropped", lost)
            return name, None
        del self._incomplete[key]
        return name, b"".join(pieces[one] for one in sorted(pieces))
