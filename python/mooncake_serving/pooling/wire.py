"""Messages as bytes.

A message is ``MAGIC``, whose last byte is the version, one byte for its kind, its integers in
little endian, and for some kinds a tail: parts, numbers or a reason. Messages come from other
processes: every length is checked, and a tail has a bound.
"""

from struct import Struct, iter_unpack

from mooncake_kernels.errors import InvalidArgument

from .messages import (
    MAX_NUMBERS,
    MAX_PARTS,
    MAX_REASON,
    Attend,
    Attended,
    Free,
    Message,
    Part,
    Refused,
    Renew,
    Renewed,
    Reserve,
    Reserved,
    Store,
    Stored,
)

MAGIC = b"MKP\x01"

# kind: the message, and its integers apart from the tail
KINDS: dict[int, tuple[type[Message], Struct]] = {
    1: (Reserve, Struct("<QIQ7I")),
    2: (Store, Struct("<QQII")),
    3: (Attend, Struct("<QI")),
    4: (Free, Struct("<Q")),
    5: (Renew, Struct("<Q")),
    16: (Reserved, Struct("<QQII")),
    17: (Stored, Struct("<Q")),
    18: (Attended, Struct("<Q")),
    19: (Refused, Struct("<Q")),
    20: (Renewed, Struct("<Q")),
}
_KIND_OF = {message: (kind, integers) for kind, (message, integers) in KINDS.items()}
_PART, _NUMBER = Struct("<QII"), Struct("<Q")


def encode(message: Message) -> bytes:
    """Encode a message; a reason is cut to ``MAX_REASON`` bytes.

    Raises:
        InvalidArgument: too many parts or numbers.
    """
    kind, integers = _KIND_OF[type(message)]
    if isinstance(message, Attend | Renew | Renewed | Refused):
        body = integers.pack(*message[:-1]) + _encode_tail(message)
    else:
        body = integers.pack(*message)
    return MAGIC + bytes([kind]) + body


def _encode_tail(message: Attend | Renew | Renewed | Refused) -> bytes:
    if isinstance(message, Refused):
        return message.reason.encode()[:MAX_REASON]
    if isinstance(message, Attend):
        _check_count("parts", len(message.parts), MAX_PARTS)
        return b"".join(_PART.pack(*part) for part in message.parts)
    _check_count("loans", len(message.loans), MAX_NUMBERS)
    return b"".join(_NUMBER.pack(number) for number in message.loans)


def decode(data: bytes) -> Message:
    """Decode a message.

    Raises:
        InvalidArgument: it is not a message of this version, of exactly its length.
    """
    if data[: len(MAGIC)] != MAGIC or len(data) <= len(MAGIC):
        raise InvalidArgument(f"decode: message must begin with {MAGIC!r}, got {data[:8]!r}")
    kind = data[len(MAGIC)]
    if kind not in KINDS:
        raise InvalidArgument(f"decode: kind must be one of {list(KINDS)}, got {kind}")
    message, integers = KINDS[kind]
    body = data[len(MAGIC) + 1 :]
    has_tail = message in (Attend, Renew, Renewed, Refused)
    if len(body) < integers.size or (len(body) > integers.size and not has_tail):
        raise InvalidArgument(
            f"decode: {message.__name__} must have {integers.size} bytes, got {len(body)}"
        )
    fields = integers.unpack_from(body)
    return message(*fields, *_decode_tail(message, body[integers.size :]))


def _decode_tail(message: type[Message], tail: bytes) -> tuple:
    if message is Refused:
        _check_count("reason", len(tail), MAX_REASON)
        return (tail.decode(errors="replace"),)
    if message is Attend:
        _check_tail("parts", tail, _PART, MAX_PARTS)
        return (tuple(Part(*part) for part in iter_unpack(_PART.format, tail)),)
    if message in (Renew, Renewed):
        _check_tail("loans", tail, _NUMBER, MAX_NUMBERS)
        return (tuple(number for (number,) in iter_unpack(_NUMBER.format, tail)),)
    return ()


def _check_tail(name: str, tail: bytes, item: Struct, limit: int) -> None:
    if len(tail) % item.size:
        raise InvalidArgument(
            f"decode: {name} must be of {item.size} bytes each, got {len(tail)} bytes"
        )
    _check_count(name, len(tail) // item.size, limit)


def _check_count(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidArgument(f"message: {name} must be at most {limit}, got {count}")
