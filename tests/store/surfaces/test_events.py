"""Publishers over real sockets: all events are received, despite slow, dead or strange peers."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import uuid

import msgspec
import numpy as np
import pytest
import zmq

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import object_keys
from mooncake_serving.store.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisher,
    subscribe,
)
from mooncake_serving.store.events import publisher as publisher_module
from mooncake_serving.store.events import replay as replay_module
from mooncake_serving.store.events.publisher import ChangeQueue

from ...stopping import stop
from ..support import WAIT_S, child, eventually, kill
from .support import VllmBlockStored, VllmMapBatch

TCP = "tcp://127.0.0.1:0"
STALLED = """
import sys, zmq
socket = zmq.Context().socket(zmq.SUB)
socket.subscribe(b"")
socket.connect(sys.argv[1])
socket.recv_multipart()
print("heard", flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["tcp", "inproc"])
def endpoints(request):
    """Two, of events and of replays."""
    if request.param == "tcp":
        return TCP, TCP
    return f"inproc://{uuid.uuid4()}", f"inproc://{uuid.uuid4()}"


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Of a busy machine: heartbeats come when nothing else does, which can be at any moment there,
    and what is sent again comes late.
    """
    monkeypatch.setattr(publisher_module, "HEARTBEAT_S", 1000)
    monkeypatch.setattr(replay_module, "WAIT_S", WAIT_S)


@pytest.fixture
def publisher():
    with EventPublisher(TCP, replay_endpoint=TCP, namespace="a") as made:
        yield made


def tell_stored(publisher: EventPublisher, stored: np.ndarray) -> None:
    publisher.publish((BlockStored, stored, "CPU"))


def keys(*hashes: int, namespace: str = "a") -> np.ndarray:
    return object_keys(list(hashes), namespace)


@contextlib.contextmanager
def listening(publisher, **options):
    """A subscription that hears, and has heard all so far."""
    options.setdefault("replay_endpoint", publisher.replay_endpoint or None)
    with subscribe(publisher.endpoint, **options) as subscription:
        heard = []

        def is_heard():
            publisher.publish_snapshot(keys())
            heard.append(subscription.receive(0.02))
            return heard[-1] is not None

        eventually(is_heard)
        publisher.publish_snapshot(keys(0))
        while BlockStored not in [type(event) for event in heard[-1].events]:
            heard.append(subscription.receive(WAIT_S))
            assert heard[-1] is not None
        yield subscription


def hear(subscription, num_hashes: int) -> list[tuple[type, list]]:
    """Changes until there are so many, without a gap: neighbours of a kind as one."""
    heard: list[tuple[type, list]] = []
    while sum(len(hashes) for _, hashes in heard) < num_hashes:
        batch = subscription.receive(WAIT_S)
        assert batch is not None and not batch.is_after_gap
        for event in batch.events:
            if not heard or heard[-1][0] is not type(event):
                heard.append((type(event), []))
            heard[-1][1].extend(getattr(event, "block_hashes", []))
    return heard


@pytest.mark.parametrize("form", ["map", "array"])
def test_published_events_are_received(endpoints, form):
    options = {"replay_endpoint": endpoints[1], "namespace": "a", "form": form}
    others = np.concatenate([keys(5, namespace="b"), keys(1, 2)])
    with EventPublisher(endpoints[0], **options) as publisher, listening(publisher) as heard:
        publisher.publish((BlockStored, others, "CPU"))
        publisher.publish((BlockRemoved, others, "CPU"), (BlockStored, keys(3), "STORAGE"))
        assert hear(heard, 5) == [
            (BlockStored, [1, 2]),
            (BlockRemoved, [1, 2]),
            (BlockStored, [3]),
        ]


def test_events_of_those_who_know_more_are_published_as_they_are(publisher):
    events = [
        BlockStored([1, 2], None, [5, 6, 7, 8], 2, None, "GPU"),
        BlockStored([3], 2, [9, 10], 2, None, "GPU"),
        BlockRemoved([3], "GPU"),
        BlockRemoved([3], "GPU"),
    ]
    with listening(publisher) as subscription:
        publisher.publish_events(*events[:3])
        tell_stored(publisher, keys(4))
        publisher.publish_events(events[3])
        heard = []
        while len(heard) < 5:
            heard += subscription.receive(WAIT_S).events
    assert heard[:3] == events[:3] and heard[4] == events[3]
    assert (heard[3].block_hashes, heard[3].medium) == ([4], "CPU")


def test_whole_keys_are_published_for_all_namespaces():
    with EventPublisher(TCP) as publisher, listening(publisher) as heard:
        tell_stored(publisher, np.array([[1, 2**64 - 1]], np.uint64))
        assert hear(heard, 1) == [(BlockStored, [bytes(7) + b"\x01" + b"\xff" * 8])]


def test_snapshot_replaces_all_previous_state(publisher):
    many = keys(*range(10_000))
    with listening(publisher) as heard:
        tell_stored(publisher, keys(99_999))
        publisher.publish_snapshot(many)
        told = hear(heard, 10_001)
    assert told == [
        (BlockStored, [99_999]),
        (AllBlocksCleared, []),
        (BlockStored, list(range(10_000))),
    ]


def test_snapshot_is_queued_atomically(publisher, monkeypatch):
    """What happens while it is published comes after it, or before."""
    taken = []
    monkeypatch.setattr(publisher._queue, "put", lambda *changes: taken.append(len(changes)))
    publisher.publish_snapshot(keys(*range(10_000)))
    assert taken == [4]


def test_invalid_snapshot_keys_are_rejected(publisher):
    for wrong in (None, "x", [1, 2, 3], [[1, 2, 3]], [[-1, 2]], [[1.5, 2]]):
        with pytest.raises(InvalidArgument, match="^publish_snapshot: keys must be"):
            publisher.publish_snapshot(wrong)
    publisher.publish_snapshot([])


@pytest.mark.skipif(not socket.has_ipv6, reason="without IPv6")
def test_ipv6_endpoints():
    with EventPublisher("tcp://[::1]:0", replay_endpoint="tcp://[::1]:0", namespace="a") as made:
        assert made.endpoint.startswith("tcp://[::1]:")
        with listening(made) as heard:
            tell_stored(made, keys(1))
            assert hear(heard, 1) == [(BlockStored, [1])]


def test_frames_and_fields_match_vllm():
    """A subscriber that is not ours, with vLLM's structs and sockets."""
    with EventPublisher(
        TCP, topic="kv", replay_endpoint=TCP, namespace="a", block_size=256, data_parallel_rank=3
    ) as publisher:
        context = zmq.Context.instance()
        with context.socket(zmq.SUB) as listener, context.socket(zmq.DEALER) as asking:
            listener.subscribe(b"kv")
            listener.connect(publisher.endpoint)
            asking.connect(publisher.replay_endpoint)

            def is_heard():
                tell_stored(publisher, keys(1, 2))
                return listener.poll(20)

            eventually(is_heard)
            topic, number, payload = listener.recv_multipart()
            assert topic == b"kv" and len(number) == 8
            batch = msgspec.msgpack.decode(payload, type=VllmMapBatch)
            assert batch.data_parallel_rank == 3
            event = batch.events[0]
            assert set(event.block_hashes) == {1, 2}
            event.block_hashes = []
            assert event == VllmBlockStored([], None, [], 256, None, "CPU", None)

            asking.send_multipart((b"", number))
            answers = []
            while not answers or answers[-1][3]:
                assert asking.poll(WAIT_S * 1000)
                answers.append(asking.recv_multipart())
            assert answers[0] == [b"", b"kv", number, payload]
            assert answers[-1] == [b"", b"", b"\xff" * 8, b""]
            numbers = [int.from_bytes(answer[2], "big") for answer in answers[:-1]]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_only_the_last_batches_are_kept(monkeypatch):
    monkeypatch.setattr(publisher_module, "MAX_BATCH", 1)
    with EventPublisher(TCP, replay_endpoint=TCP, buffer_steps=3, namespace="a") as publisher:
        for key in range(5):
            tell_stored(publisher, keys(key))
        with zmq.Context.instance().socket(zmq.DEALER) as asking:
            asking.connect(publisher.replay_endpoint)

            def kept():
                asking.send_multipart((b"", bytes(8)))
                answers = []
                while not answers or answers[-1][3]:
                    assert asking.poll(WAIT_S * 1000)
                    answers.append(asking.recv_multipart())
                batches = [msgspec.msgpack.decode(answer[3]) for answer in answers[:-1]]
                return [batch[1][0]["block_hashes"] for batch in batches]

            eventually(lambda: kept() == [[2], [3], [4]])


def test_heartbeats_do_not_displace_kept_batches(monkeypatch):
    monkeypatch.setattr(publisher_module, "HEARTBEAT_S", 0.005)
    with EventPublisher(TCP, replay_endpoint=TCP, buffer_steps=3, namespace="a") as publisher:
        with listening(publisher) as heard:
            first = heard._expected
        with subscribe(publisher.endpoint) as waiting:
            tell_stored(publisher, keys(1))  # the only change
            silent = 0
            while silent < 20:
                silent = 0 if waiting.receive(WAIT_S).events else silent + 1
        with subscribe(publisher.endpoint, replay_endpoint=publisher.replay_endpoint) as heard:
            heard._expected = first
            assert hear(heard, 1) == [(BlockStored, [1])]
            for _ in range(20):
                batch = heard.receive(WAIT_S)
                assert batch.events == [] and not batch.is_after_gap


def test_replay_buffer(monkeypatch):
    """Numbers that were skipped stay so; of too many empty ones the last are there."""
    kept = replay_module.KeptBatches(3)
    for number in (10, 11, 12, 14, 15, 16, 17, 18, 20, 21):
        kept.add(number, b"%d" % number, is_empty=number not in (12, 15, 18))
    empty = [10, 11, 14, 16, 17, 20, 21]
    full = [(12, b"12"), (15, b"15"), (18, b"18")]

    def expected(numbers):
        return sorted([*full, *((number, b"21") for number in numbers)])

    assert list(kept.since(0)) == expected(empty)
    assert list(kept.since(17)) == [(17, b"21"), (18, b"18"), (20, b"21"), (21, b"21")]
    assert list(kept.since(22)) == []
    monkeypatch.setattr(replay_module, "MAX_EMPTY", 3)
    assert list(kept.since(0)) == expected(empty[-3:])
    monkeypatch.undo()
    for number in (22, 23, 24):
        kept.add(number, b"", is_empty=False)
    assert [number for number, _ in kept.since(0)] == [20, 21, 22, 23, 24]
    for number in range(25, 1001):
        kept.add(number, b"", is_empty=number % 2 == 0)
    assert [number for number, _ in kept.since(0)] == list(range(994, 1001))


def test_replays_of_arrays_have_no_topic():
    """As readers of that time expect: ``number, payload``."""
    with EventPublisher(TCP, replay_endpoint=TCP, namespace="a", form="array") as publisher:
        tell_stored(publisher, object_keys([1, 2], "a"))
        with zmq.Context.instance().socket(zmq.DEALER) as asking:
            asking.connect(publisher.replay_endpoint)

            def ask() -> list[list[bytes]]:
                asking.send_multipart((b"", bytes(8)))
                answers: list[list[bytes]] = []
                while not answers or answers[-1][-1]:
                    assert asking.poll(WAIT_S * 1000)
                    answers.append(asking.recv_multipart()[1:])
                return answers

            eventually(lambda: len(ask()) > 1)
            (number, payload), end = ask()
            assert len(number) == 8 and end == [b"\xff" * 8, b""]
            [[kind, hashes, *_]] = msgspec.msgpack.decode(payload)[1]
            assert kind == "BlockStored" and len(hashes) == 2


def test_malformed_replay_requests_are_ignored(publisher):
    with zmq.Context.instance().socket(zmq.DEALER) as stranger:
        stranger.connect(publisher.replay_endpoint)
        for frames in [(b"x",), (b"", b"short"), (b"x", bytes(8)), (b"", bytes(8), b"more")]:
            stranger.send_multipart(frames)
        stranger.send_multipart((b"", b"\xff" * 8))
        assert stranger.poll(WAIT_S * 1000)
        assert stranger.recv_multipart() == [b"", b"", b"\xff" * 8, b""]


def test_slow_subscriber_catches_up_by_replay(monkeypatch):
    """20 MB are more than its socket holds; the rest is dropped, and had again."""
    monkeypatch.setattr(publisher_module, "MAX_BATCH", 1)
    monkeypatch.setattr(publisher_module, "HEARTBEAT_S", 0.1)
    replays = []
    answer = publisher_module.answer_replay
    monkeypatch.setattr(
        publisher_module, "answer_replay", lambda *args: (replays.append(1), answer(*args))
    )
    with EventPublisher(TCP, replay_endpoint=TCP, hwm=1) as publisher:
        with listening(publisher, hwm=1) as heard:
            for number in range(40):
                tell_stored(publisher, object_keys(np.full(1 << 15, number), "a"))
            eventually(lambda: not publisher._queue._changes)
            [(kind, hashes)] = hear(heard, 40 << 15)
    numbers = [int.from_bytes(one[:8], "big") for one in hashes]
    assert kind is BlockStored and numbers == [i for i in range(40) for _ in range(1 << 15)]
    assert replays


def test_stopped_and_killed_subscribers_delay_no_one(publisher, monkeypatch):
    monkeypatch.setattr(publisher_module, "MAX_BATCH", 1)
    with subprocess.Popen(
        [sys.executable, "-c", STALLED, publisher.endpoint],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as stalled:

        def has_heard():
            publisher.publish_snapshot(keys())
            return os.get_blocking(stalled.stdout.fileno()) or stalled.stdout.read()

        os.set_blocking(stalled.stdout.fileno(), False)
        eventually(has_heard)
        stop(stalled.pid)
        some = keys(*range(4096))
        with listening(publisher) as heard:
            for _ in range(300):
                tell_stored(publisher, some)
            assert len(hear(heard, 300 * 4096)[0][1]) == 300 * 4096
            stalled.kill()
            publisher.publish((BlockRemoved, some, "CPU"))
            assert hear(heard, 4096)[0][0] is BlockRemoved


def test_restarted_publisher_is_reported_as_a_gap(tmp_path):
    endpoint = f"ipc://{tmp_path}/events"

    def life():
        with EventPublisher(endpoint, namespace="a") as publisher:
            while True:
                tell_stored(publisher, keys(os.getpid()))
                threading.Event().wait(0.01)

    with subscribe(endpoint) as heard:
        with child(life) as first:
            batches = [heard.receive(WAIT_S) for _ in range(3)]
            # Before the first one, something may have come.
            assert [batch.is_after_gap for batch in batches] == [True, False, False]
            assert batches[2].sequence == batches[0].sequence + 2
            kill(first)
        with child(life) as second:
            batch = heard.receive(WAIT_S)
            while batch.events[0].block_hashes[0] == first:  # what it has sent before its end
                assert not batch.is_after_gap
                batch = heard.receive(WAIT_S)
            assert batch.is_after_gap and batch.events[0].block_hashes[0] == second
            assert not heard.receive(WAIT_S).is_after_gap


def test_silence_is_reported(monkeypatch):
    monkeypatch.setattr(publisher_module, "HEARTBEAT_S", 0.01)
    with EventPublisher(TCP) as publisher, subscribe(publisher.endpoint) as heard:
        first, second = heard.receive(WAIT_S), heard.receive(WAIT_S)
    assert first.events == second.events == [] and second.sequence == first.sequence + 1


def test_silence_is_reported_while_replays_are_requested(monkeypatch):
    monkeypatch.setattr(publisher_module, "HEARTBEAT_S", 0.2)
    with (
        EventPublisher(TCP, replay_endpoint=TCP) as publisher,
        subscribe(publisher.endpoint) as heard,
        zmq.Context.instance().socket(zmq.DEALER) as asking,
    ):
        asking.connect(publisher.replay_endpoint)

        def is_heard():
            asking.send_multipart((b"", b"\xff" * 8))
            return heard.receive(0.01) is not None

        eventually(is_heard)


def test_nothing_is_kept_without_a_replay_endpoint():
    with EventPublisher(TCP, namespace="a") as publisher, listening(publisher) as heard:
        tell_stored(publisher, keys(1))
        assert hear(heard, 1) == [(BlockStored, [1])]
        assert publisher._kept is None


def test_close_sends_queued_events(publisher):
    with listening(publisher) as heard:
        tell_stored(publisher, keys(*range(1, 4)))
        publisher.close()
        publisher.close()
        tell_stored(publisher, keys(9))
        assert hear(heard, 3) == [(BlockStored, [1, 2, 3])]
    eventually(lambda: not [one for one in threading.enumerate() if one.name == "kv-events"])


def test_changes_by_threads_are_published_once(publisher):
    with listening(publisher) as heard:

        def life(first):
            for key in range(first, first + 500):
                tell_stored(publisher, keys(key))

        threads = [threading.Thread(target=life, args=(i * 500,)) for i in range(1, 5)]
        for thread in threads:
            thread.start()
        [(kind, hashes)] = hear(heard, 2000)
        for thread in threads:
            thread.join()
    assert kind is BlockStored and sorted(hashes) == list(range(500, 2500))
    for i in range(1, 5):
        own = [one for one in hashes if one // 500 == i]
        assert own == sorted(own)


def test_queue_overflow_leaves_a_gap(monkeypatch):
    """A put does not wait for it: what does not fit is dropped, and the subscriber knows where."""
    may_go_on, encode = threading.Event(), publisher_module.encode
    with EventPublisher(TCP, namespace="a") as publisher, listening(publisher) as heard:
        monkeypatch.setattr(publisher._queue, "_capacity", 10)

        def slow(*args):
            may_go_on.wait(WAIT_S)
            return encode(*args)

        monkeypatch.setattr(publisher_module, "encode", slow)
        tell_stored(publisher, keys(1))
        eventually(lambda: not publisher._queue._changes)  # the thread has it
        for key in range(2, 32):
            tell_stored(publisher, keys(key))
        assert publisher.num_dropped == 20
        may_go_on.set()
        assert hear(heard, 11) == [(BlockStored, list(range(1, 12)))]
        batch = heard.receive(WAIT_S)  # at once: the gap is not noticed only with the next change
        assert batch.is_after_gap and batch.events == []
        tell_stored(publisher, keys(32))
        assert hear(heard, 1) == [(BlockStored, [32])]


def test_change_queue():
    queue: ChangeQueue[int] = ChangeQueue(2)
    for number in range(5):
        queue.put(number)
    assert queue.take(2) == [0, 1] and queue.num_dropped == 3
    queue.put(5)
    assert queue.take(9) == [None, 5] and queue.take(9) == []
    queue.put(6, 7, 8)
    assert queue.take(9) == [6, 7, None] and queue.num_dropped == 4
    assert queue.close() and not queue.close()
    queue.put(6)
    assert queue.take(9) == []
    queue.destroy()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"endpoint": "nowhere"}, "endpoint must be an endpoint like"),
        ({"endpoint": 5}, "endpoint must be a str, got 5"),
        ({"replay_endpoint": "x://y"}, "replay_endpoint must be an endpoint like"),
        ({"endpoint": "tcp://127.0.0.1:70000"}, "endpoint must have a port from 0 to 65535, got"),
        ({"buffer_steps": 0}, "buffer_steps must be an integer from 1 to 2147383646, got 0"),
        ({"buffer_steps": 2**31}, "buffer_steps must be an integer from 1 to 2147383646, got 2147"),
        ({"hwm": 1.5}, "hwm must be an integer from 1 to 2147483647, got 1.5"),
        ({"hwm": 2**31}, "hwm must be an integer from 1 to 2147483647, got 2147483648"),
        ({"form": "json"}, 'form must be "map" or "array", got \'json\''),
        ({"namespace": 5.0}, "EventPublisher: namespace must be a str or None, got 5.0"),
        ({"topic": 5}, "topic must be a str, got 5"),
        ({"topic": "\ud800"}, "topic must be a str, got '.ud800'"),
        ({"data_parallel_rank": "0"}, "data_parallel_rank must be an integer from 0 to 184467"),
        ({"data_parallel_rank": 2**64}, "data_parallel_rank must be an integer from 0 to 184467"),
        (
            {"block_size": -1},
            "block_size must be an integer from 0 to 18446744073709551615, got -1",
        ),
        (
            {"block_size": 2**64},
            "block_size must be an integer from 0 to 18446744073709551615, got",
        ),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(InvalidArgument, match=message):
        EventPublisher(**{"endpoint": TCP, **options})


def test_endpoint_in_use_is_reported(publisher):
    with pytest.raises(OSError, match=f"endpoint {publisher.endpoint}"):
        EventPublisher(publisher.endpoint)
    with EventPublisher(TCP) as other:
        free = other.endpoint

    def complaint(**options) -> str:
        try:
            EventPublisher(free, **options).close()
        except OSError as error:
            return str(error)
        return ""

    # ZeroMQ gives ports back in a thread of its own.
    taken = publisher.replay_endpoint
    eventually(lambda: f"replay_endpoint {taken}" in complaint(replay_endpoint=taken))
    eventually(lambda: complaint() == "", "the one that failed has given it back")
