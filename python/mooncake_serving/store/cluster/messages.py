"""Messages between nodes: requests and answers."""

import secrets
import time
from collections.abc import Container
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from mooncake_kernels.errors import FailureKind
from mooncake_kernels.pool import PoolStats, PutResult

from ... import rpc
from ...rpc import MAX_REASON, Number, Reason
from .put import HARD, PUT_OPTIONS

MAGIC = b"MKS\x02"
MAX_MESSAGE_BYTES = 64 << 10  # of a notification
MAX_KEYS = 1024  # of a request
MAX_PULLED = 128  # keys of a pull, whose answer may have a reason for each
MAX_PLACES_BYTES = 32 << 10  # of a pull
MAX_DEADLINE_MS = 3_600_000
KEY_BYTES = PLACE_BYTES = 16
CHECKSUM_BYTES = 8

# The result of a pin, where the object is, and its checksum (0: none): a row for each key.
PINNED, ABSENT, DAMAGED, BUSY = range(4)
FOUND = np.dtype([("status", "<u8"), ("address", "<u8"), ("num_bytes", "<u8"), ("checksum", "<u8")])
PLACE = np.dtype([("address", "<u8"), ("num_bytes", "<u8")])

Result = Annotated[int, msgspec.Meta(ge=0, le=max(result.value for result in PutResult))]
Deadline = Annotated[int, msgspec.Meta(ge=0, le=MAX_DEADLINE_MS)]
Keys = Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES * MAX_KEYS)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]


class Request(rpc.Message, frozen=True):
    """The common part of all requests.

    Attributes:
        life: random, new for every node: a name may have belonged to another node before.
        deadline_ms: for how long the sender waits for the result.
    """

    life: Number
    deadline_ms: Deadline


class _OfKeys(Request, frozen=True):
    keys: Keys

    def __post_init__(self) -> None:
        if len(self.keys) % KEY_BYTES:
            raise ValueError("keys must be of 16 bytes each")


class Pin(_OfKeys, frozen=True, tag=1):
    """Keep objects where they are until the token, this request's number, is released."""

    verify: bool


class Release(Request, frozen=True, tag=2):
    """End the pins of a token. It is answered only on request."""

    token: Number
    is_answered: bool


class Pull(_OfKeys, frozen=True, tag=3):
    """Take copies of objects: from ``source``'s pool, or from ``places`` in its memory.

    Attributes:
        source: name of a member.
        places: for each key the ranges of its bytes, in order (``PLACE``); empty: in the source's
            pool.
        checksums: of those bytes, 8 bytes for each place; empty: not computed.
        options: how the copies are kept, ``PUT_OPTIONS`` for each key; empty: as after any put.
    """

    source: Name
    verify: bool
    places: Annotated[
        list[Annotated[bytes, msgspec.Meta(max_length=MAX_PLACES_BYTES)]],
        msgspec.Meta(max_length=MAX_PULLED),
    ]
    checksums: Annotated[bytes, msgspec.Meta(max_length=CHECKSUM_BYTES * MAX_PULLED)]
    options: Annotated[bytes, msgspec.Meta(max_length=PUT_OPTIONS.itemsize * MAX_PULLED)]

    def __post_init__(self) -> None:
        super().__post_init__()
        num_keys = len(self.keys) // KEY_BYTES
        if num_keys > MAX_PULLED or len(self.places) not in (0, num_keys):
            raise ValueError(f"keys must be {MAX_PULLED} or fewer, with places for all or none")
        if any(len(place) % PLACE_BYTES for place in self.places):
            raise ValueError("places must be of 16 bytes each")
        if len(self.checksums) not in (0, CHECKSUM_BYTES * len(self.places)):
            raise ValueError("checksums must be of 8 bytes each, for all places or none")
        if len(self.options) not in (0, PUT_OPTIONS.itemsize * num_keys):
            raise ValueError("options must be of 3 bytes each, for all keys or none")
        if (self.option_rows()["retention"] > HARD).any():
            raise ValueError(f"options must have retentions up to {HARD}")

    def option_rows(self) -> np.ndarray:
        """``[n]`` of ``PUT_OPTIONS``."""
        if self.options:
            return np.frombuffer(self.options, PUT_OPTIONS)
        return np.zeros(len(self.keys) // KEY_BYTES, PUT_OPTIONS)


class Drop(_OfKeys, frozen=True, tag=4):
    """Remove objects."""


class Stat(Request, frozen=True, tag=5):
    """Return the statistics of the pool."""


class Missed(_OfKeys, frozen=True, tag=6):
    """Objects that the sender has not found here, although the directory lists them. It is not
    answered.
    """


class Retain(_OfKeys, frozen=True, tag=7):
    """Set how long objects stay: the index in ``RETENTIONS``."""

    retention: Annotated[int, msgspec.Meta(ge=0, le=HARD)]


class Pinned(rpc.Message, frozen=True, tag=16):
    """To ``Pin``: ``FOUND`` for each key."""

    found: Annotated[bytes, msgspec.Meta(max_length=FOUND.itemsize * MAX_KEYS)]

    def __post_init__(self) -> None:
        if len(self.found) % FOUND.itemsize:
            raise ValueError("found must be of 32 bytes each")

    def rows(self) -> np.ndarray:
        return np.frombuffer(self.found, FOUND)


class Released(rpc.Message, frozen=True, tag=17):
    """To ``Release``: whether the pins were held until then."""

    held: bool


class Pulled(rpc.Message, frozen=True, tag=18):
    """To ``Pull``, for each key: the value of a ``PutResult``, or the reason of a failure."""

    results: Annotated[
        list[Result | Reason],
        msgspec.Meta(max_length=MAX_PULLED),
    ]


class Dropped(rpc.Message, frozen=True, tag=19):
    """To ``Drop``: how many there were."""

    count: Number


class Stats(rpc.Message, frozen=True, tag=20):
    """To ``Stat``; None: there is no pool."""

    pool: PoolStats | None


class Retained(rpc.Message, frozen=True, tag=22):
    """To ``Retain``: how many there were."""

    count: Number


Response = Pinned | Released | Pulled | Dropped | Stats | Retained | rpc.Refused
Message = Pin | Release | Pull | Drop | Stat | Missed | Retain | Response

_codec: rpc.Codec[Message] = rpc.Codec(MAGIC, Message, "docs/internals/cluster.md")
encode, decode = _codec.encode, _codec.decode


def key_bytes(keys: np.ndarray) -> bytes:
    """``[n, 2]`` uint64, as messages carry them."""
    return np.ascontiguousarray(keys, "<u8").tobytes()


def keys_of(data: bytes) -> np.ndarray:
    return np.frombuffer(data, "<u8").astype(np.uint64, copy=False).reshape(-1, 2)


def reason_of(error: BaseException) -> str:
    """An error as an answer carries it."""
    return f"{type(error).__name__}: {error}"[:MAX_REASON]


A = TypeVar("A", bound=Response)
R = TypeVar("R", bound=Request)


class NodeRpc(rpc.RpcClient):
    """Requests of this node to others. Thread-safe.

    Attributes:
        life: of this node, see ``Request``.
    """

    def __init__(self, peers: rpc.Peers):
        super().__init__(peers, encode)
        self.life = secrets.randbits(62)

    def make(self, kind: type[R], valid_s: float, *, number: int | None = None, **fields: Any) -> R:
        """Make a request of this node."""
        number = self.next_number() if number is None else number
        return kind(number, self.life, int(valid_s * 1000), **fields)

    def request(
        self,
        name: str,
        kind: type[Request],
        expected: type[A],
        deadline_s: float,
        *,
        valid_s: float | None = None,
        number: int | None = None,
        **fields: Any,
    ) -> A:
        """Send a request to a node, and wait for its answer.

        Args:
            name: of its engine.
            kind: of request.
            expected: kind of answer.
            deadline_s: seconds until the answer must be here.
            valid_s: for how long the other node shall regard the request; None: ``deadline_s``.
            number: of the request; None: the next.
            **fields: of the request.

        Raises:
            TransferError: the node cannot be reached, refuses, or does not answer in time. The
                request may have been carried out.
        """
        valid_s = deadline_s if valid_s is None else valid_s
        request = self.make(kind, valid_s, number=number, **fields)
        return self.call(name, request, expected, deadline_s)

    def fail_to(self, name: str) -> None:
        """Fail requests to a node, in whose place there is another one."""
        self.fail(lambda call: call.name == name, "it was restarted", FailureKind.GONE)

    def give_up(self, living: Container[str], grace_s: float) -> None:
        """Fail requests to nodes that are not members, unless they were just sent.

        A directory that was restarted does not know its members yet.
        """
        before = time.monotonic() - grace_s
        self.fail(
            lambda call: call.name not in living and call.started_s < before,
            "it is no member any more",
            FailureKind.GONE,
        )
