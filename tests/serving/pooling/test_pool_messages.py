"""Messages: what is sent arrives, and nothing else is accepted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_kernels import InvalidArgument
from mooncake_serving.pooling import messages
from mooncake_serving.pooling.wire import KINDS, MAGIC, decode, encode

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
PARTS = st.lists(st.builds(messages.Part, U64, U32, U32), max_size=5).map(tuple)
ALL = st.one_of(
    st.builds(messages.Reserve, U64, U32, U64, *[U32] * 7),
    st.builds(messages.Store, U64, U64, U32, U32),
    st.builds(messages.Attend, U64, U32, PARTS),
    st.builds(messages.Free, U64),
    st.builds(messages.Renew, U64, st.lists(U64, max_size=5).map(tuple)),
    st.builds(messages.Reserved, U64, U64, U32, U32),
    st.builds(messages.Stored, U64),
    st.builds(messages.Attended, U64),
    st.builds(messages.Renewed, U64, st.lists(U64, max_size=5).map(tuple)),
    st.builds(messages.Refused, U64, st.text(max_size=40)),
)
ONES_WITH_TAILS = messages.Attend | messages.Renew | messages.Renewed | messages.Refused


@given(ALL)
def test_what_is_encoded_is_decoded(message):
    decoded = decode(encode(message))
    assert decoded == message and type(decoded) is type(message)


@given(ALL, st.data())
def test_no_other_length_is_accepted_unless_it_is_a_shorter_tail(message, data):
    encoded = encode(message)
    cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    try:
        decoded = decode(cut)
    except InvalidArgument:
        return
    assert type(decoded) is type(message) and decoded[:-1] == message[:-1]
    assert isinstance(decoded, ONES_WITH_TAILS)


@given(st.binary(max_size=100))
def test_any_bytes_are_a_message_or_refused(data):
    for candidate in (data, MAGIC + data):
        try:
            message = decode(candidate)
        except InvalidArgument:
            continue
        assert type(message) in [kind for kind, _ in KINDS.values()]


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "must begin with"),
        (b"MKP\x01", "must begin with"),
        (b"MKP\x02\x04" + bytes(8), "must begin with"),
        (b"MKP\x01\x09" + bytes(8), "kind must be one of"),
        (b"MKP\x01\x04" + bytes(9), "Free must have 8 bytes, got 9"),
        (b"MKP\x01\x03" + bytes(12 + 17), "parts must be of 16 bytes each, got 17"),
        (b"MKP\x01\x03" + bytes(12 + 16 * 1025), "parts must be at most 1024, got 1025"),
        (b"MKP\x01\x05" + bytes(8 + 8 * 4097), "loans must be at most 4096, got 4097"),
        (b"MKP\x01\x13" + bytes(8 + 257), "reason must be at most 256, got 257"),
    ],
)
def test_a_bad_message_is_named(data, message):
    with pytest.raises(InvalidArgument, match=message):
        decode(data)


def test_a_long_reason_is_cut_and_too_many_parts_are_refused():
    assert len(decode(encode(messages.Refused(1, "é" * 300))).reason) in (128, 129)
    with pytest.raises(InvalidArgument, match="parts must be at most 1024, got 1025"):
        encode(messages.Attend(1, 0, [messages.Part(1, 1, 1)] * 1025))
    assert len(encode(messages.Renew(1, range(4096)))) < 64 << 10, "it fits into a notification"
