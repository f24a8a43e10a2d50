"""Messages between instances, each one notification of the transfer engine (see ``wire``)."""

from collections.abc import Sequence
from typing import NamedTuple

MAX_PARTS = 1024  # of an Attend
MAX_NUMBERS = 4096  # of a Renew, and of its answer
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
    """From a debtor: it still has these loans. Answer: Renewed."""

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


class Renewed(NamedTuple):
    """To Renew: which of the loans have not ended."""

    number: int
    loans: Sequence[int]


class Refused(NamedTuple):
    """To any request: nothing was done."""

    number: int
    reason: str


Request = Reserve | Store | Attend | Free | Renew
Answer = Reserved | Stored | Attended | Renewed | Refused
Message = Request | Answer
