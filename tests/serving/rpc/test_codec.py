"""What is encoded is decoded, and nothing else."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.rpc import MAX_REASON, Refused

from .support import CODEC, Add, Sum

MAGIC = b"ADD\x01"
NUMBERS = st.integers(0, 2**64 - 1)
MESSAGES = st.one_of(
    st.builds(Add, NUMBERS, st.lists(NUMBERS, max_size=3).map(tuple)),
    st.builds(Sum, NUMBERS, st.integers(-(2**63), 2**64 - 1)),
    st.builds(Refused, NUMBERS, st.text(max_size=MAX_REASON)),
)


@given(MESSAGES)
def test_messages_round_trip(message):
    assert CODEC.decode(CODEC.encode(message)) == message


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_rejected(data):
    for candidate in (data, MAGIC + data):
        try:
            assert isinstance(CODEC.decode(candidate), Add | Sum | Refused)
        except InvalidArgument:
            continue


@pytest.mark.parametrize(
    "words",
    [
        [2, 1],
        [1, 1],
        [1, -1, []],
        [1, 1, [], 1],
        [1, 1, [0] * 4],
        [16, 1, "1"],
        [21, 1, "x" * (MAX_REASON + 1)],
        [],
        {},
        None,
    ],
)
def test_out_of_bounds_fields_are_rejected(words):
    with pytest.raises(InvalidArgument, match="decode: message must be as this file says"):
        CODEC.decode(MAGIC + msgspec.msgpack.encode(words))


@pytest.mark.parametrize("body", [b"", b"\x91" * 60_000, b"\x93\x15\x01\xa1\xff"])
def test_malformed_msgpack_is_rejected(body):
    with pytest.raises(InvalidArgument, match="message must be as"):
        CODEC.decode(MAGIC + body)


@pytest.mark.parametrize("data", [b"", b"ADD", b"ADD\x02" + CODEC.encode(Add(1, ()))[4:]])
def test_another_version_is_rejected(data):
    with pytest.raises(InvalidArgument, match=r"must begin with b'ADD\\x01'"):
        CODEC.decode(data)
