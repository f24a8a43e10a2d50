"""Notifications: what a ``TransferNotify`` is on the wire."""

import struct
from dataclasses import dataclass

from mooncake_kernels.errors import InvalidArgument

_HEADER = struct.Struct("<8sI")  # the magic, bytes of the name; then the name and the message
_MAGIC = b"MKNOTIFY"


@dataclass
class TransferNotify:
    """What a peer finds in ``get_notifies`` once the data is there: two texts.

    Attributes:
        name: who or what it is about.
        msg: the message.
    """

    name: str = ""
    msg: str = ""


def encode(notify: TransferNotify | None) -> bytes | None:
    """The bytes of a notification for ``TransferEngine.write`` and ``read``."""
    if notify is None:
        return None
    try:
        name, message = notify.name.encode(), notify.msg.encode()
    except (AttributeError, UnicodeError):
        raise InvalidArgument(
            f"notify must be a TransferNotify of two texts, got {notify!r:.80}"
        ) from None
    return _HEADER.pack(_MAGIC, len(name)) + name + message


def decode(sender: str, payload: bytes) -> TransferNotify:
    """The notification in the bytes; of a peer with another API: its name, and all of them."""
    name, message = sender.encode(), payload
    if payload.startswith(_MAGIC) and len(payload) >= _HEADER.size:
        begin = _HEADER.size + _HEADER.unpack_from(payload)[1]
        name, message = payload[_HEADER.size : begin], payload[begin:]
    return TransferNotify(*(text.decode(errors="backslashreplace") for text in (name, message)))
