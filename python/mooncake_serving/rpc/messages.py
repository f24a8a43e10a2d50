"""What the messages of all protocols have in common, and how they become bytes.

A message is the protocol's magic number, whose last byte is the version, and a msgpack array. What
is decoded comes from other processes: nothing in it is longer than its bound, and every value has
its type.
"""

from typing import Annotated, Any, Generic, TypeVar

import msgspec

from mooncake_kernels.errors import InvalidArgument

MAX_REASON = 256

Number = Annotated[int, msgspec.Meta(ge=0)]  # and below 2**64, the limit of msgpack
Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON)]


class Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The common part of all messages. Those of a protocol have different tags.

    Attributes:
        number: of the request, which identifies its answer.
    """

    number: Number


class Refused(Message, frozen=True, tag=21):
    """To any request: why it is not carried out."""

    reason: Reason


M = TypeVar("M", bound=Message)


class Codec(Generic[M]):
    """Encodes and decodes the messages of a protocol. Thread-safe.

    Args:
        magic: what each begins with.
        kinds: the union of their types.
        page: where they are described.
    """

    def __init__(self, magic: bytes, kinds: Any, page: str):
        self._magic, self._page = magic, page
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(kinds)

    def encode(self, message: M) -> bytes:
        return self._magic + self._encoder.encode(message)

    def decode(self, data: bytes) -> M:
        """Decode a message.

        Raises:
            InvalidArgument: it is not a message of this version.
        """
        magic, body = data[: len(self._magic)], data[len(self._magic) :]
        if magic != self._magic:
            raise InvalidArgument(f"decode: message must begin with {self._magic!r}, got {magic!r}")
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            wanted = f"message must be as {self._page} says"
            raise InvalidArgument(f"decode: {wanted}: {error}") from None
