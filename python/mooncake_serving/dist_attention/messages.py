"""Messages between instances: requests of borrowers, and lenders' answers."""

from typing import Annotated, NamedTuple

from msgspec import Meta

from .. import rpc
from ..rpc import Number

MAGIC = b"MKP\x02"
MAX_PARTS = 1024  # of an Attend
MAX_NUMBERS = 4096  # of a Renew, and of its answer

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Loans = Annotated[tuple[Number, ...], Meta(max_length=MAX_NUMBERS)]


class Part(NamedTuple):
    """Consecutive queries of one request: they attend to all that is stored of one loan."""

    loan: Number
    q_len: U32
    num_blocks: U32  # stored of it by now, as the borrower counts them


class Reserve(rpc.Message, frozen=True, tag=1):
    """From a borrower: reserve blocks; the loan gets this number. Answers: Reserved, Refused."""

    num_blocks: U32
    results_address: Number  # of the borrower's ResultBuffer
    geometry: tuple[U32, U32, U32, U32, U32, U32, U32]  # Geometry.numbers()


class Store(rpc.Message, frozen=True, tag=2):
    """From a borrower: its staged blocks are the next ones of a loan. Answer: Stored."""

    loan: Number
    first_block: U32
    num_blocks: U32


class Attend(rpc.Message, frozen=True, tag=3):
    """From a borrower: attend with the queries it has written. Answer: Attended."""

    layer_index: U32
    parts: Annotated[tuple[Part, ...], Meta(max_length=MAX_PARTS)]


class Free(rpc.Message, frozen=True, tag=4):
    """From a borrower: the loan of this number ends. No answer."""


class Renew(rpc.Message, frozen=True, tag=5):
    """From a borrower: it still has these loans. Answer: Renewed."""

    loans: Loans


class Reserved(rpc.Message, frozen=True, tag=16):
    """To Reserve."""

    requests_address: Number  # of the lender's RequestBuffer
    num_staged: U32  # blocks that it takes at a time
    lease_ms: U32  # a loan that is not renewed for that long ends


class Stored(rpc.Message, frozen=True, tag=17):
    """To Store: the blocks are in the lender's cache."""


class Attended(rpc.Message, frozen=True, tag=18):
    """To Attend: out and lse have been written."""


class Renewed(rpc.Message, frozen=True, tag=19):
    """To Renew: which of the loans have not ended."""

    loans: Loans


Request = Reserve | Store | Attend | Free | Renew
Answer = Reserved | Stored | Attended | Renewed | rpc.Refused
Message = Request | Answer

_codec: rpc.Codec[Message] = rpc.Codec(MAGIC, Message, "docs/serving/dist_attention.md")
encode, decode = _codec.encode, _codec.decode
