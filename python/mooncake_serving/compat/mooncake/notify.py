"""Notifications: the wire format of a ``TransferNotify``."""

import struct
from dataclasses import dataclass

from mooncake_kernels.errors import InvalidArgument

_HEADER = struct.Struct("<8sI")  # the magic, bytes of the name; then the name and the message
_MAGIC = b"MKNOTIFY"


@dataclass
class TransferNotify:
    """What a peer receives by ``get_notifies`` once the data is there: two texts.

    Attributes:
        name: the subject.
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
    """Decode a notification; if the peer uses another API: its name, and all the bytes."""
    name, message = sender.encode(), payload
    if payload.startswith(_MAGIC) and len(payload) >= _HEADER.size:
        begin = _HEADER.size + _HEADER.unpack_from(payload)[1]
        name, message = payload[_HEADER.size : begin], payload[begin:]
    return TransferNotify(*(text.decode(errors="backslashreplace") for text in (name, message)))
