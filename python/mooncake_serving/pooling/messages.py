"""Messages between instances, each one notification of the transfer engine.

A message is ``MAGIC``, whose last byte is the version, one byte for its kind, its integers in
little endian, and for some kinds a tail: parts, numbers or a reason. Messages come from other
processes: every length is checked, and a tail has a bound.
"""

from collections.abc import Sequence
from struct import Struct, iter_unpack
from typing import NamedTuple

from mooncake_kernels.errors import InvalidArgument

MAGIC = b"MKP\x01"
MAX_PARTS = 1024  # of an Attend
MAX_NUMBERS = 4096  # of a Renew
MAX_REASON = 256  # bytes


class Part(NamedTuple):
    """Consecutive queries of one request: they attend to all that is stored of one loan."""

    loan: int
    q_len: int
    num_blocks: int  # stored of it by now, as the debtor counts them


class Reserve(NamedTuple):
    """From a debtor: reserve blocks; the loan gets this number. Answers: Reserved, Refused."""

    number: int
    num_blocks: int
    results_address: int  # of the debtor's ResultBuffer
    num_layers: int  # from here on: Geometry.numbers()
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: int
    max_rows: int


class Store(NamedTuple):
    """From a debtor: its staged blocks are the next ones of a loan. Answer: Stored."""

    number: int
    loan: int
    first_block: int
    num_blocks: int


class Attend(NamedTuple):
    """From a debtor: attend with the queries it has written. Answer: Attended."""

    number: int
    layer_index: int
    parts: Sequence[Part]


class Free(NamedTuple):
    """From a debtor: the loan of this number ends. No answer."""

    number: int


class Renew(NamedTuple):
    """From a debtor: it still has these loans. No answer."""

    number: int
    loans: Sequence[int]


class Reserved(NamedTuple):
    """To Reserve."""

    number: int
    requests_address: int  # of the creditor's RequestBuffer
    num_staged: int  # blocks that it takes at a time
    lease_ms: int  # a loan that is not renewed for so long ends


class Stored(NamedTuple):
    """To Store: the blocks are in the creditor's cache."""

    number: int


class Attended(NamedTuple):
    """To Attend: out and lse have been written."""

    number: int


class Refused(NamedTuple):
    """To any request: nothing was done."""

    number: int
    reason: str


Request = Reserve | Store | Attend | Free | Renew
Answer = Reserved | Stored | Attended | Refused
Message = Request | Answer

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
}
_KIND_OF = {message: (kind, integers) for kind, (message, integers) in KINDS.items()}
_PART, _NUMBER = Struct("<QII"), Struct("<Q")


def encode(message: Message) -> bytes:
    """Encode a message; a reason is cut to ``MAX_REASON`` bytes.

    Raises:
        InvalidArgument: too many parts or numbers.
    """
    kind, integers = _KIND_OF[type(message)]
    if isinstance(message, Attend | Renew | Refused):
        body = integers.pack(*message[:-1]) + _encode_tail(message)
    else:
        body = integers.pack(*message)
    return MAGIC + bytes([kind]) + body


def _encode_tail(message: Attend | Renew | Refused) -> bytes:
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
    has_tail = message in (Attend, Renew, Refused)
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
    if message is Renew:
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
