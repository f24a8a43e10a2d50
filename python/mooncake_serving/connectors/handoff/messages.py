"""The messages of a hand-off; ``__init__`` says who sends them when."""

from typing import Annotated

import msgspec

from ...rpc import Codec, Message, Number, Reason

MAGIC = b"MKH\x03"
MAX_HEADER = 48 << 10  # bytes; with the rest of its message it fits in a notification
MAX_GROUPS = 64
MAX_RANKS = 4096
MAX_NUMBERS = 4096
MAX_WANTS = 2  # unanswered, of one call: a chunk is packed while another is written
MAX_TEXT = 512  # characters of a name

Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Digest = Annotated[bytes, msgspec.Meta(max_length=64)]
Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class GroupForm(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """One group of the receiver's cache, as ``mk.CacheGroup`` has it."""

    name: Text
    kind: Text
    window: Size | None
    tokens_per_block: Annotated[int, msgspec.Meta(ge=1, lt=1 << 40)]


class Ask(Message, frozen=True, tag=1):
    """Receiver to sender: send me that part of a transfer.

    Attributes:
        engine_id: of the engine that must be there; "": any.
        transfer_id: of the transfer.
        model: its name; "" on either side: not compared.
        digest: of the prompt's first ``num_tokens`` tokens, so that another prompt is refused.
        first_token, num_tokens: tokens ``first_token`` up to ``num_tokens`` are required.
        receiver_id: of the receiving engine, the same of all its ranks.
        num_receivers: of how many of these this sender is asked for the transfer.
        slot_bytes: of a landing slot.
        groups: of the receiver's cache.
    """

    engine_id: Text
    transfer_id: Text
    model: Text
    digest: Digest
    first_token: Size
    num_tokens: Size
    receiver_id: Text
    num_receivers: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    slot_bytes: Size
    groups: Annotated[list[GroupForm], msgspec.Meta(max_length=MAX_GROUPS)]


class Want(Message, frozen=True, tag=2):
    """Sender to receiver: a chunk is ready; where may it be written?"""


class Grant(Message, frozen=True, tag=3):
    """Receiver to sender: it may be written there, once."""

    slot: Size
    address: Number


class Chunk(Message, frozen=True, tag=4):
    """Sender to receiver, after the data: a slot is written, and not touched again."""

    slot: Size
    header: Annotated[bytes, msgspec.Meta(max_length=MAX_HEADER)]


class Spare(Message, frozen=True, tag=12):
    """Sender to receiver: a slot that was granted is not needed now, and not written to."""

    slot: Size


class Cancel(Message, frozen=True, tag=5):
    """Receiver to sender: write no more of this. Answered by ``Ended``, also if unknown."""


class Ended(Message, frozen=True, tag=6):
    """Sender to receiver: no write of this is under way, nor will be.

    Attributes:
        reason: "" if all of it was written; otherwise why not.
    """

    reason: Reason


class Asking(Message, frozen=True, tag=7):
    """Receiver to sender, every second: what it still waits for. Unknown ones get ``Ended``."""

    numbers: Annotated[list[Number], msgspec.Meta(max_length=MAX_NUMBERS)]


class Serving(Message, frozen=True, tag=8):
    """Sender to receiver, every second: what it is still going to send."""

    numbers: Annotated[list[Number], msgspec.Meta(max_length=MAX_NUMBERS)]


class Release(Message, frozen=True, tag=9):
    """Receiver to sender: no one will ask you for this transfer (any more)."""

    engine_id: Text
    transfer_id: Text


class Describe(Message, frozen=True, tag=10):
    """Receiver to the first rank of a sending engine: where are your ranks?"""


class Described(Message, frozen=True, tag=11):
    """The answer, once they are known."""

    engine_id: Text
    ranks: Annotated[list[Text], msgspec.Meta(max_length=MAX_RANKS)]


AnyMessage = (
    Ask
    | Want
    | Grant
    | Chunk
    | Spare
    | Cancel
    | Ended
    | Asking
    | Serving
    | Release
    | Describe
    | Described
)
CODEC: Codec[Message] = Codec(MAGIC, AnyMessage, "mooncake_serving/connectors/handoff/messages.py")
