"""Redis replies, split in any way."""

import pytest

from mooncake_kernels.metadata.redis_replies import MAX_LINE_BYTES, Replies

ANSWERS = {
    b"+OK\r\n": b"OK",
    b"+\r\n": b"",
    b":-7\r\n": -7,
    b"$0\r\n\r\n": b"",
    b"$-1\r\n": None,
    b"$6\r\na\r\n\0\xffb\r\n": b"a\r\n\0\xffb",
    b"*-1\r\n": None,
    b"*0\r\n": [],
    b"*3\r\n:1\r\n*2\r\n$1\r\na\r\n$-1\r\n+b\r\n": [1, [b"a", None], b"b"],
}
NONSENSE = [
    b"\r\n",
    b"HTTP/1.1 400 Bad Request\r\n",
    b"%1\r\n",
    b":\r\n",
    b":1.5\r\n",
    b"$x\r\n",
    b"$-2\r\n",
    b"*-2\r\n",
    b"*1\r\n?\r\n",
    b"$1\r\nabc\r\n",
    b"x" * (MAX_LINE_BYTES + 2),
]


class Refused(Exception):
    pass


def replies_of(*pieces: bytes) -> Replies:
    """Of a server that says these, and closes."""
    left = iter(pieces)
    return Replies(lambda num_bytes: next(left, b""), Refused)


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 5, 1000])
def test_replies_may_arrive_in_pieces(num_bytes):
    said = b"".join(ANSWERS)
    pieces = [said[i : i + num_bytes] for i in range(0, len(said), num_bytes)]
    replies = replies_of(*pieces)
    assert replies.read(len(ANSWERS)) == list(ANSWERS.values())
    assert replies.is_empty()
    assert replies.read(0) == []


def test_long_string_reply():
    size = 3_000_000
    pieces = [b"$%d\r\n" % size, *[size // 10 * b"x"] * 10, b"\r\n:1\r\n"]
    replies = replies_of(*pieces)
    assert replies.read(1) == [size * b"x"] and not replies.is_empty()
    assert replies.read(1) == [1] and replies.is_empty()


def test_surplus_bytes_are_noticed():
    for behind in (b":2\r\n", b"$5\r\nab", b"\r"):
        replies = replies_of(b":1\r\n" + behind)
        assert replies.read(1) == [1]
        assert not replies.is_empty()


def test_error_replies_are_returned():
    (refused, (nested, behind)) = replies_of(b"-ERR a \xff\r\n*2\r\n-NO\r\n:1\r\n").read(2)
    assert isinstance(refused, Refused) and str(refused) == "ERR a �"
    assert isinstance(nested, Refused) and behind == 1


@pytest.mark.parametrize("said", NONSENSE)
def test_malformed_replies_are_rejected(said):
    with pytest.raises(ValueError):
        replies_of(said).read(1)


@pytest.mark.parametrize("said", [b"", b":1", b"$5\r\nab", b"$2\r\nab\r", b"*2\r\n:1\r\n"])
def test_truncated_reply_is_a_connection_error(said):
    with pytest.raises(ConnectionError, match="the server has closed the connection"):
        replies_of(said).read(1)
