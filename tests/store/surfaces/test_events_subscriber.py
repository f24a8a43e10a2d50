"""Subscriptions to publishers of any kind: missed batches, and nonsense."""

import contextlib
import select
import socket
import threading

import msgspec
import pytest
import zmq

from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.store.events import AllBlocksCleared, BlockRemoved, subscribe
from mooncake_serving.store.events import replay as replay_module
from mooncake_serving.store.events import subscriber as subscriber_module
from mooncake_serving.store.events.messages import encode

from ..support import WAIT_S, eventually

END = b"\xff" * 8


def payload(number: int) -> bytes:
    return encode([BlockRemoved([number])], None, "map")


class AnyPublisher:
    """Sends what it is told to, and answers each request for a replay with ``answers``."""

    def __init__(self):
        context = zmq.Context.instance()
        self._publish = context.socket(zmq.PUB)
        self._publish.bind("tcp://127.0.0.1:0")
        self._replay = context.socket(zmq.ROUTER)
        self._replay.bind("tcp://127.0.0.1:0")
        self.endpoint = self._publish.getsockopt_string(zmq.LAST_ENDPOINT)
        self.replay_endpoint = self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        self.answers: list[tuple[bytes, ...]] = []
        self.requests: list[int] = []
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()

    def send(self, number: int, content: bytes | None = None) -> None:
        content = payload(number) if content is None else content
        self.send_frames(b"", number.to_bytes(8, "big"), content)

    def send_frames(self, *frames: bytes) -> None:
        self._publish.send_multipart(frames)

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()
        self._publish.close(linger=0)
        self._replay.close(linger=0)

    def _answer(self) -> None:
        while not self._is_closed.is_set():
            if self._replay.poll(10):
                client, delimiter, start = self._replay.recv_multipart()
                self.requests.append(int.from_bytes(start, "big"))
                for answer in self.answers:
                    self._replay.send_multipart((client, delimiter, *answer))


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """What is sent again comes late on a busy machine."""
    monkeypatch.setattr(replay_module, "WAIT_S", WAIT_S)


@pytest.fixture
def publisher():
    made = AnyPublisher()
    yield made
    made.close()


@contextlib.contextmanager
def listening(publisher, *, replay=True):
    """A subscription that has heard the batch 0."""
    where = publisher.replay_endpoint if replay else None
    with subscribe(publisher.endpoint, replay_endpoint=where) as heard:

        def is_heard():
            publisher.send(0, b"no batch")
            return heard.receive(0.02) is not None or heard.num_malformed

        eventually(is_heard)
        publisher.send(0)
        assert heard.receive(WAIT_S).sequence == 0
        heard.num_malformed = 0
        yield heard


def numbers(heard, count: int) -> list[tuple[int, bool]]:
    batches = [heard.receive(WAIT_S) for _ in range(count)]
    assert all(batch.events == [BlockRemoved([batch.sequence])] for batch in batches)
    return [(batch.sequence, batch.is_after_gap) for batch in batches]


@pytest.mark.parametrize("has_topic", [True, False])
def test_missed_batches_are_replayed(publisher, has_topic):
    topic = (b"",) if has_topic else ()
    publisher.answers = [
        *((*topic, number.to_bytes(8, "big"), payload(number)) for number in range(1, 6)),
        (*topic, END, b""),
    ]
    with listening(publisher) as heard:
        publisher.send(3)
        publisher.send(4)
        assert numbers(heard, 4) == [(1, False), (2, False), (3, False), (4, False)]
        assert publisher.requests == [1] and heard.receive(0.05) is None


def test_batches_before_the_first_are_replayed(publisher):
    publisher.answers = [
        *((b"", number.to_bytes(8, "big"), payload(number)) for number in range(7, 12)),
        (b"", END, b""),
    ]
    with subscribe(publisher.endpoint, replay_endpoint=publisher.replay_endpoint) as heard:
        batches = []

        def is_heard():
            publisher.send(9)
            batches.append(heard.receive(0.02))
            return batches[-1] is not None

        eventually(is_heard)
        assert batches[-1].sequence == 7 and batches[-1].is_after_gap  # what came before?
        assert numbers(heard, 2) == [(8, False), (9, False)]
        assert publisher.requests == [0]


@pytest.mark.parametrize("number", [0, 7])
@pytest.mark.parametrize("is_snapshot", [False, True])
def test_first_batch_is_after_a_gap_unless_complete(publisher, number, is_snapshot):
    events = [AllBlocksCleared()] if is_snapshot else []
    with subscribe(publisher.endpoint) as heard:
        batches = []

        def is_heard():
            publisher.send(number, encode([*events, BlockRemoved([1])], None, "map"))
            batches.append(heard.receive(0.02))
            return batches[-1] is not None

        eventually(is_heard)
        assert batches[-1].is_after_gap == (number > 0 and not is_snapshot)


def test_batches_missing_from_the_replay_are_a_gap(publisher):
    publisher.answers = [(b"", (4).to_bytes(8, "big"), payload(4)), (b"", END, b"")]
    with listening(publisher) as heard:
        publisher.send(5)
        assert numbers(heard, 2) == [(4, True), (5, False)]


@pytest.mark.parametrize("sent", [(1, 3, 4), (1, 0, 1)], ids=["lost", "restarted"])
def test_gaps_without_replay_are_permanent(publisher, sent):
    with listening(publisher, replay=False) as heard:
        for number in sent:
            publisher.send(number)
        assert numbers(heard, 3) == [(sent[0], False), (sent[1], True), (sent[2], False)]


@pytest.mark.parametrize(
    "answers",
    [
        [],  # it never says that this is the end
        [(b"x",), (b"", b"short", b"x"), (b"", END, b"")],
        [(b"", (2).to_bytes(8, "big"), b"no batch"), (b"", END, b"")],
        [(b"", (9).to_bytes(8, "big"), payload(9)), (b"", END, b"")],  # not asked for
    ],
)
def test_malformed_replays_are_a_gap(publisher, answers, monkeypatch):
    monkeypatch.setattr(replay_module, "WAIT_S", 0.3)
    publisher.answers = answers
    with listening(publisher) as heard:
        publisher.send(3)
        assert numbers(heard, 1) == [(3, True)]
        publisher.send(4)
        assert numbers(heard, 1) == [(4, False)]


def test_no_one_answers(publisher, monkeypatch):
    monkeypatch.setattr(replay_module, "WAIT_S", 0.2)
    with listening(publisher) as heard:
        heard._replay_endpoint = "tcp://127.0.0.1:1"
        publisher.send(2)
        assert numbers(heard, 1) == [(2, True)]


def test_malformed_batches_are_logged_once(publisher, caplog):
    with subscribe(publisher.endpoint) as heard:

        def has_skipped() -> bool:
            publisher.send(0, b"x")  # also a subscription takes its time
            return heard.receive(0.02) is None and heard.num_malformed > 1

        eventually(has_skipped)
    assert caplog.text.count("is no batch of KV events, and is skipped") == 1


def test_malformed_batches_are_counted_and_reported_as_a_gap(publisher):
    with listening(publisher, replay=False) as heard:
        publisher.send_frames(b"", b"short", payload(1))
        publisher.send_frames(b"alone")
        publisher.send(1, b"\xc1")
        publisher.send(2)
        assert numbers(heard, 1) == [(2, True)] and heard.num_malformed == 3


def test_unknown_events_are_counted_and_the_first_is_logged(publisher, caplog):
    with listening(publisher) as heard:
        later = [["BlockMoved", [1]], ["TierAdded"], ["BlockRemoved", [1]]]
        publisher.send(1, msgspec.msgpack.encode([1.0, later, None]))
        publisher.send(2, msgspec.msgpack.encode([1.0, later[:1], None]))
        assert [heard.receive(WAIT_S).events for _ in range(2)] == [[BlockRemoved([1])], []]
        assert heard.num_unknown == 3 and heard.num_malformed == 0
    assert caplog.text.count("unknown type") == 1 and "BlockMoved" in caplog.text


class Cable:
    """Carries connections to a port, until they are cut: then none ends, and nothing arrives."""

    def __init__(self, port: int):
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._other_end: dict[socket.socket, socket.socket] = {}
        self.num_connections = 0
        self.is_cut = threading.Event()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _carry(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._listener)
            while not self._is_closed.is_set():
                if self.is_cut.is_set():
                    self._other_end.clear()
                    self.is_cut.clear()
                ready, _, _ = select.select([self._listener, *self._other_end], [], [], 0.01)
                for one in ready:
                    if one is self._listener:
                        near = stack.enter_context(self._listener.accept()[0])
                        far = stack.enter_context(
                            socket.create_connection(("127.0.0.1", self._port))
                        )
                        self._other_end |= {near: far, far: near}
                        self.num_connections += 1
                    elif data := one.recv(65536):
                        self._other_end[one].sendall(data)
                    else:
                        self._other_end.pop(self._other_end.pop(one))


def test_subscriber_reconnects_when_the_publishers_host_vanished(publisher, monkeypatch):
    """A subscriber says nothing by itself, and so would never learn that no one is there."""
    monkeypatch.setattr(subscriber_module, "PING_S", 0.1)
    monkeypatch.setattr(subscriber_module, "GONE_S", 0.5)
    cable = Cable(int(publisher.endpoint.rpartition(":")[2]))
    try:
        with subscribe(cable.endpoint) as heard:

            def is_heard():
                publisher.send(0)
                return heard.receive(0.02)

            eventually(is_heard)
            before = cable.num_connections
            cable.is_cut.set()
            eventually(lambda: not cable.is_cut.is_set() and not is_heard())
            assert eventually(is_heard) and cable.num_connections > before
    finally:
        cable.close()


def test_iteration_and_topics(publisher):
    with subscribe(publisher.endpoint, topic="kv") as heard:

        def is_heard():
            publisher.send_frames(b"other", bytes(8), payload(9))
            publisher.send_frames(b"kv", bytes(8), payload(0))
            return heard.receive(0.02)

        eventually(is_heard)
        publisher.send_frames(b"kv", bytes(8), payload(0))
        batch = next(iter(heard))
        assert batch.events == [BlockRemoved([0])]
        heard.close()
        heard.close()


def test_wrong_arguments(publisher):
    with pytest.raises(InvalidArgument, match="subscribe: endpoint must be an endpoint like"):
        subscribe("nowhere")
    with pytest.raises(InvalidArgument, match="subscribe: endpoint must be a str, got 7"):
        subscribe(7)
    for wrong in (0, 2**31):
        with pytest.raises(InvalidArgument, match="hwm must be an integer from 1 to 2147483647"):
            subscribe(publisher.endpoint, hwm=wrong)
    for wrong in (7, b"kv", "\ud800"):
        with pytest.raises(InvalidArgument, match="subscribe: topic must be a str, got"):
            subscribe(publisher.endpoint, topic=wrong)
    with pytest.raises(InvalidArgument, match="endpoint must have a port from 0 to 65535, got"):
        subscribe("tcp://127.0.0.1:70000")
    with subscribe(publisher.endpoint) as heard:
        for wrong in ("1", float("nan")):
            with pytest.raises(InvalidArgument, match="receive: timeout_s must be seconds or None"):
                heard.receive(wrong)
        assert heard.receive(-1) is None
    for use in (lambda: heard.receive(0), lambda: next(iter(heard)), heard.__enter__):
        with pytest.raises(InvalidArgument, match="must be open, got a closed one"):
            use()
    with pytest.raises(InvalidArgument, match="subscribe: replay_endpoint must be an endpoint"):
        subscribe(publisher.endpoint, replay_endpoint="nowhere")
