"""Messages: what is sent arrives, and nothing else is accepted."""

import typing

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_kernels import InvalidArgument
from mooncake_serving.dist_attention import messages
from mooncake_serving.dist_attention.messages import MAGIC, MAX_NUMBERS, MAX_PARTS, decode, encode
from mooncake_serving.rpc import MAX_REASON, Refused

LAST_32, LAST = 2**32 - 1, 2**64 - 1
U32, U64 = st.integers(0, LAST_32), st.integers(0, LAST)
LOANS = st.lists(U64, max_size=5).map(tuple)
PARTS = st.lists(st.builds(messages.Part, U64, U32, U32), max_size=5).map(tuple)
ALL = st.one_of(
    st.builds(messages.Reserve, U64, U32, U64, st.tuples(*[U32] * 7)),
    st.builds(messages.Store, U64, U64, U32, U32),
    st.builds(messages.Attend, U64, U32, PARTS),
    st.builds(messages.Free, U64),
    st.builds(messages.Renew, U64, LOANS),
    st.builds(messages.Reserved, U64, U64, U32, U32),
    st.builds(messages.Stored, U64),
    st.builds(messages.Attended, U64),
    st.builds(messages.Renewed, U64, LOANS),
    st.builds(Refused, U64, st.text(max_size=40)),
)


@given(ALL)
def test_what_is_encoded_is_decoded(message):
    decoded = decode(encode(message))
    assert decoded == message and type(decoded) is type(message)


@given(ALL, st.data())
def test_messages_of_another_length_are_rejected(message, data):
    encoded = encode(message)
    cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    for other in (cut, encoded + b"\0"):
        with pytest.raises(InvalidArgument):
            decode(other)


@given(st.binary(max_size=100))
def test_any_bytes_are_a_message_or_refused(data):
    for candidate in (data, MAGIC + data):
        try:
            message = decode(candidate)
        except InvalidArgument:
            continue
        assert isinstance(message, typing.get_args(messages.Message))


@pytest.mark.parametrize("data", [b"", b"MKP\x01" + encode(messages.Free(1))[4:]])
def test_another_version_is_refused(data):
    with pytest.raises(InvalidArgument, match="must begin with"):
        decode(data)


@pytest.mark.parametrize(
    "words",
    [
        [9, 1],
        [4],
        [4, 1, 1],
        [4, -1],
        [4, 1.0],
        [4, True],
        [4, None],
        [1, 1, 2**32, 3, [0] * 7],
        [1, 1, 2, -3, [0] * 7],
        [1, 1, 2, 3, [0] * 6],
        [1, 1, 2, 3, [0] * 8],
        [1, 1, 2, 3, [0] * 6 + [2**32]],
        [2, 1, 2, 3],
        [2, 1, 2, 2**32, 4],
        [3, 1, 2**32, []],
        [3, 1, 0, [[1, 1]]],
        [3, 1, 0, [[1, 1, 1, 1]]],
        [3, 1, 0, [[1, 2**32, 1]]],
        [3, 1, 0, [[1, 1, -1]]],
        [3, 1, 0, [[1, 1, 1]] * (MAX_PARTS + 1)],
        [5, 1, [-1]],
        [5, 1, [0] * (MAX_NUMBERS + 1)],
        [16, 1, 2, 3, 2**32],
        [19, 1, [0] * (MAX_NUMBERS + 1)],
        [21, 1, "x" * (MAX_REASON + 1)],
        [21, 1, b"reason"],
        {"number": 1},
    ],
)
def test_what_is_out_of_bounds_is_refused(words):
    with pytest.raises(InvalidArgument, match="message must be"):
        decode(MAGIC + msgspec.msgpack.encode(words))


def test_the_largest_fit_into_a_notification():
    for message in (
        messages.Attend(LAST, LAST_32, (messages.Part(LAST, LAST_32, LAST_32),) * MAX_PARTS),
        messages.Renew(LAST, (LAST,) * MAX_NUMBERS),
        messages.Renewed(LAST, (LAST,) * MAX_NUMBERS),
        Refused(LAST, "é" * MAX_REASON),
    ):
        assert len(encode(message)) <= 64 << 10
        assert decode(encode(message)) == message
