"""Messages between nodes survive a round trip; messages from strangers do no harm."""

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncake_kernels.errors import InvalidArgument, TransferError
from mooncake_kernels.transfer import TransferEngine
from mooncake_serving.rpc import Refused
from mooncake_serving.store.cluster import messages
from mooncake_serving.store.cluster.messages import MAGIC, decode, encode
from mooncake_serving.store.cluster.put import uniform_options
from mooncake_serving.store.directory import EmbeddedDirectory

from .support import Hosts, replaced, value

NUMBERS = st.integers(0, 2**64 - 1)
DEADLINES = st.integers(0, messages.MAX_DEADLINE_MS)
KEYS = st.integers(0, 40).map(lambda n: value(n, 16 * n))
PLACES = st.integers(0, 9).map(lambda n: value(n, 16 * n))
REASONS = st.text(max_size=messages.MAX_REASON)
STATS = messages.PoolStats(*range(12))


def pulls(number, life, deadline_ms, places, is_placed):
    keys = value(1, 16 * len(places))
    places = places if is_placed else []
    sums = value(2, 8 * len(places))
    options = uniform_options(len(keys) // 16, "hard").tobytes() if number % 2 else b""
    return messages.Pull(number, life, deadline_ms, keys, "10.0.0.1:7", True, places, sums, options)


MESSAGES = st.one_of(
    st.builds(messages.Pin, NUMBERS, NUMBERS, DEADLINES, KEYS, st.booleans()),
    st.builds(messages.Release, NUMBERS, NUMBERS, DEADLINES, NUMBERS, st.booleans()),
    st.builds(pulls, NUMBERS, NUMBERS, DEADLINES, st.lists(PLACES, max_size=9), st.booleans()),
    st.builds(messages.Drop, NUMBERS, NUMBERS, DEADLINES, KEYS),
    st.builds(messages.Stat, NUMBERS, NUMBERS, DEADLINES),
    st.builds(messages.Missed, NUMBERS, NUMBERS, DEADLINES, KEYS),
    st.builds(messages.Retain, NUMBERS, NUMBERS, DEADLINES, KEYS, st.integers(0, 2)),
    st.builds(messages.Pinned, NUMBERS, st.integers(0, 9).map(lambda n: value(n, 32 * n))),
    st.builds(messages.Released, NUMBERS, st.booleans()),
    st.builds(messages.Pulled, NUMBERS, st.lists(st.integers(0, 4) | REASONS, max_size=9)),
    st.builds(messages.Dropped, NUMBERS, NUMBERS),
    st.builds(messages.Retained, NUMBERS, NUMBERS),
    st.builds(messages.Stats, NUMBERS, st.sampled_from([None, STATS])),
    st.builds(Refused, NUMBERS, REASONS),
)


@given(MESSAGES)
def test_messages_round_trip(message):
    assert decode(encode(message)) == message


def test_largest_messages_fit_into_a_notification():
    keys, name = bytes(16 * messages.MAX_PULLED), "n" * 255
    last = 2**64 - 1
    whole = messages.MAX_PLACES_BYTES // messages.MAX_PULLED
    places = [bytes(whole)] * messages.MAX_PULLED
    options = bytes(messages.PUT_OPTIONS.itemsize * len(places))
    for message in (
        messages.Pin(last, last, 1, bytes(16 * messages.MAX_KEYS), True),
        messages.Pinned(last, bytes(32 * messages.MAX_KEYS)),
        messages.Pull(last, last, 1, keys, name, True, places, bytes(8 * len(places)), options),
        messages.Pulled(last, ["x" * messages.MAX_REASON] * messages.MAX_PULLED),
    ):
        assert len(encode(message)) <= messages.MAX_MESSAGE_BYTES
        assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "words",
    [
        [1, 1, 2, 3, bytes(15), True],
        [1, 1, 2, 3, bytes(16 * messages.MAX_KEYS + 16), True],
        [1, -1, 2, 3, b"", True],
        [1, 1, 2, messages.MAX_DEADLINE_MS + 1, b"", True],
        [1, 1, 2, 3, "keys", True],
        [1, 1, 2, 3, b"", 1],
        [1, 1, 2, 3, b""],
        [1, 1, 2, 3, b"", True, "more"],
        [2, 1, 2, 3, 4.5, True],
        [2, 1, 2, 3, 4],
        [3, 1, 2, 3, bytes(32), "peer", True, [b""], b"", b""],
        [3, 1, 2, 3, bytes(16), "peer", True, [b"1234"], b"", b""],
        [3, 1, 2, 3, bytes(16), "", True, [], b"", b""],
        [3, 1, 2, 3, bytes(16 * messages.MAX_PULLED + 16), "peer", True, [], b"", b""],
        [3, 1, 2, 3, bytes(16), "peer", True, [], bytes(8), b""],
        [3, 1, 2, 3, bytes(32), "peer", True, [b"", b""], bytes(8), b""],
        [3, 1, 2, 3, bytes(32), "peer", True, [], b"", bytes(3)],
        [3, 1, 2, 3, bytes(16), "peer", True, [], b"", b"\x03\x00\x00"],
        [3, 1, 2, 3, bytes(16), "peer", True, [], b""],
        [6, 1, 2, 3, bytes(15)],
        [7, 1, 2, 3, bytes(16), 3],
        [16, 1, bytes(24)],
        [18, 1, [5]],
        [20, 1, {"capacity_bytes": 1}],
        [21, 1, "x" * (messages.MAX_REASON + 1)],
        [99, 1],
        [],
        17,
        [[[]]],
    ],
)
def test_out_of_bounds_messages_are_rejected(words):
    with pytest.raises(InvalidArgument, match="message must be"):
        decode(MAGIC + msgspec.msgpack.encode(words))


def test_deeply_nested_message_is_rejected():
    with pytest.raises(InvalidArgument, match="message must be"):
        decode(MAGIC + b"\x91" * 60_000)


@pytest.mark.parametrize("data", [b"", b"MK", b"MKS\x01" + encode(messages.Stat(1, 2, 3))[4:]])
def test_other_message_version_is_rejected(data):
    with pytest.raises(InvalidArgument, match="must begin with"):
        decode(data)


@pytest.fixture(scope="module")
def attacked():
    """A node with an object, and a stranger's engine that may send it what it likes."""
    hosts = Hosts(EmbeddedDirectory())
    one, two = hosts.several(2)
    one.cluster.put("a", value(1))
    with TransferEngine(transports=["tcp"]) as engine:
        peer = engine.open(one.engine.name)

        def send(data: bytes) -> None:
            engine.write(peer, [], notify=data).wait()

        yield one, two, send
    hosts.close()


ANYTHING = st.one_of(
    st.binary(min_size=1, max_size=300),
    st.binary(max_size=300).map(lambda data: MAGIC + data),
    MESSAGES.map(encode),
    st.tuples(MESSAGES.map(encode), st.integers(4, 400), st.integers(0, 255)).map(
        lambda parts: parts[0][: parts[1]] + bytes([parts[2]]) + parts[0][parts[1] + 1 :]
    ),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.lists(ANYTHING, min_size=1, max_size=5))
def test_node_survives_arbitrary_messages(attacked, data):
    one, two, send = attacked
    for message in data:
        send(message)
    assert two.node.client.stat(one.node.name).num_ready == 1
    assert two.cluster.get("a") == value(1)


def test_failing_message_does_not_stop_the_server(attacked, caplog):
    one, two, _ = attacked
    with replaced(one.node._pins, "release", lambda release, token: 1 / 0):
        two.node._rpc.post(
            one.node.name,
            two.node._rpc.make(messages.Release, 5.0, token=1, is_answered=False),
            5.0,
        )
        assert two.node.client.stat(one.node.name).num_ready == 1
    assert "is dropped" in caplog.text and "ZeroDivisionError" in caplog.text


def test_unexpected_responses_and_those_of_others_are_ignored(attacked):
    one, two, send = attacked
    client = one.node._rpc
    send(encode(messages.Released(client.next_number() + 1, True)))  # of the next question
    with pytest.raises(TransferError, match="release: the answer is Released"):
        client.request(
            two.node.name, messages.Release, messages.Pinned, 5.0, token=1, is_answered=True
        )
    assert not client.request(
        two.node.name, messages.Release, messages.Released, 5.0, token=1, is_answered=True
    ).held
    with pytest.raises(TransferError, match="release: no answer in 2 s"):
        client.request(
            two.node.name, messages.Release, messages.Released, 2.0, token=1, is_answered=False
        )
    assert not client._calls


def test_keys_round_trip_through_bytes():
    keys = np.array([[1, 2], [2**64 - 1, 0]], np.uint64)
    assert (messages.keys_of(messages.key_bytes(keys)) == keys).all()
