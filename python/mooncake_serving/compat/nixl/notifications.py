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
from .logging import get_logger, shown

_HEADER = struct.Struct("<8sQIIH")  # magic, message, piece, pieces, bytes of the sender's name
_MAGIC = b"MKNIXLN1"
_MAX_PIECE = 65536  # of the engine
_MAX_MESSAGE = 16 << 20
_MAX_PIECES = 512  # what the largest message needs, however long the sender's name is
# Incomplete messages of an engine, so that none can push out those of another. A sender that dies
# in the middle of a message leaves it.
_MAX_INCOMPLETE = 64
_MAX_INCOMPLETE_BYTES = 128 << 20
_MAX_ENGINES = 1024  # that have incomplete messages
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
        try:
            data = message.encode() if isinstance(message, str) else message
        except UnicodeEncodeError:
            raise nixlInvalidParamError(
                f"{op}: notif_msg must be a text that can be encoded, got {message!r:.80}"
            ) from None
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


class _Incomplete:
    """The messages of an engine that are not complete, the oldest first."""

    def __init__(self) -> None:
        self._messages: OrderedDict[tuple[int, int], dict[int, bytes]] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, number: int, count: int, index: int, part: bytes) -> bytes | None:
        """Add one of ``count`` pieces of a message. Returns the message if it is complete."""
        key = (number, count)
        pieces = self._messages.setdefault(key, {})
        self._num_bytes += len(part) - len(pieces.get(index, b""))
        pieces[index] = part
        if len(pieces) < count:
            return None
        self._remove(key)
        return b"".join(pieces[one] for one in range(count))

    def trim(self) -> int:
        """Drop the oldest ones if they are too many or too large. Returns how many."""
        before = len(self._messages)
        while len(self._messages) > _MAX_INCOMPLETE or self._num_bytes > _MAX_INCOMPLETE_BYTES:
            self._remove(next(iter(self._messages)))
        return before - len(self._messages)

    def _remove(self, key: tuple[int, int]) -> None:
        self._num_bytes -= sum(map(len, self._messages.pop(key).values()))


class Inbox:
    """The messages that an engine has received, by the name of their agent. Thread-safe."""

    def __init__(self, engine: TransferEngine):
        self._engine = engine
        self._lock = threading.Lock()
        self._incomplete: OrderedDict[str, _Incomplete] = OrderedDict()

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
        incomplete = self._incomplete.setdefault(engine_name, _Incomplete())
        message = incomplete.add(number, count, index, data[begin:])
        num_lost = incomplete.trim()
        if not incomplete:
            del self._incomplete[engine_name]
        if len(self._incomplete) > _MAX_ENGINES:
            engine_name, oldest = self._incomplete.popitem(last=False)
            num_lost += len(oldest)
        if num_lost:
            _log.warning(
                "%d notifications of %s never became complete, and are dropped",
                num_lost,
                shown(engine_name),
            )
        return name, message
