"""Notifications: after the data, in order, of any size; strangers' and broken ones."""

import numpy as np
import pytest

from mooncake_kernels.errors import TransferError
from mooncake_serving.compat.nixl import _bindings as nixl_bind
from mooncake_serving.compat.nixl import notifications
from mooncake_serving.compat.nixl.logging import shown

from ..support import SIZE, addressed
from .support import BLOCK, far_agent, gathered, near_agent, settle, sides


def test_after_the_data(pair):
    agent = pair.near.agent
    local, remote = sides(pair.near, pair.far)
    every = np.arange(SIZE // BLOCK)
    handle = agent.make_prepped_xfer("WRITE", local, every, remote, every, b"all of it")
    if not hasattr(pair.far, "call"):
        agent.transfer(handle)
        assert gathered(pair.far.notifs) == {"near": [b"all of it"]}
        np.testing.assert_array_equal(pair.far.read(), addressed(SIZE))
        return
    pair.far.pipe.send(("watch", ()))
    agent.transfer(handle)
    messages, memory = pair.far.pipe.recv()
    assert messages == {"near": [b"all of it"]}
    np.testing.assert_array_equal(np.frombuffer(memory, np.uint8), addressed(SIZE))
    assert settle(agent, handle) == "DONE"


def test_of_a_read(pair):
    agent = pair.near.agent
    local, remote = sides(pair.near, pair.far)
    handle = agent.make_prepped_xfer("READ", local, [0], remote, [0], "as text")
    agent.transfer(handle)
    assert settle(agent, handle) == "DONE"
    assert gathered(pair.far.notifs) == {"near": [b"as text"]}
    agent.transfer(handle, b"another")
    assert settle(agent, handle) == "DONE"
    agent.transfer(handle)
    assert settle(agent, handle) == "DONE"
    assert gathered(pair.far.notifs, 2) == {"near": [b"another", b"another"]}
    assert pair.far.notifs() == {}


@pytest.mark.parametrize("num_bytes", [0, 1, 65_000, 65_536, 1_000_000])
def test_alone_and_with_data(pair, num_bytes):
    agent = pair.near.agent
    local, remote = sides(pair.near, pair.far)
    message = addressed(max(num_bytes, 1)).tobytes()[:num_bytes]
    agent.send_notif("far", message)
    expected = [message]
    if message:
        handle = agent.make_prepped_xfer("WRITE", local, [0], remote, [0], message)
        agent.transfer(handle)
        assert settle(agent, handle) == "DONE"
        expected = [message, message]
    assert gathered(pair.far.notifs, len(expected)) == {"near": expected}


def test_in_order(pair):
    agent = pair.near.agent
    agent.add_remote_agent(pair.far.metadata)
    messages = [str(i).encode() for i in range(200)]
    for message in messages:
        agent.send_notif(b"far", message)
    assert gathered(pair.far.notifs, 200) == {"near": messages}


def test_both_ways_and_collected():
    with near_agent("near", addressed(SIZE)) as near, near_agent("far", addressed(SIZE)) as far:
        near.agent.add_remote_agent(far.metadata)
        far.agent.add_remote_agent(near.metadata)
        far.agent.send_notif("near", b"tag-1")
        far.agent.send_notif("near", b"a tag-2")
        gathered(near.agent.update_notifs, 2)
        agent = near.agent
        agent.notifs = {"far": [b"tag-1", b"a tag-2"]}
        assert not agent.check_remote_xfer_done("far", b"tag-2")
        assert agent.check_remote_xfer_done("far", b"tag-2", tag_is_prefix=False)
        assert agent.check_remote_xfer_done(b"far", b"tag")
        assert not agent.check_remote_xfer_done("far", b"tag")
        assert not agent.check_remote_xfer_done("nobody", b"tag")
        assert agent.notifs == {"far": []}


def test_wrong_messages(pair):
    agent = pair.near.agent
    agent.add_remote_agent(pair.far.metadata)
    with pytest.raises(nixl_bind.nixlNotFoundError, match="'nobody'"):
        agent.send_notif("nobody", b"x")
    with pytest.raises(nixl_bind.nixlInvalidParamError, match="notif_msg must be at most"):
        agent.send_notif("far", 5)
    with pytest.raises(nixl_bind.nixlInvalidParamError, match="notif_msg must be at most"):
        agent.send_notif("far", bytes((16 << 20) + 1))
    with pytest.raises(nixl_bind.nixlNotFoundError, match="backends must be created"):
        agent.send_notif("far", b"x", "POSIX")
    with pytest.raises(nixl_bind.nixlNotFoundError, match="backends must be created"):
        agent.get_new_notifs(["POSIX"])


class Engine:
    """Stands for the engine of an inbox."""

    def __init__(self, *received, name="10.0.0.1:1"):
        self.received, self.name = received, name

    def receive_notifications(self):
        return [(self.name, data) for data in self.received]


def test_pieces_in_any_order():
    message = addressed(200_000).tobytes()
    pieces = notifications.Sender("me").pieces("send_notif", message)
    assert len(pieces) == 4 and max(map(len, pieces)) <= 65536
    inbox = notifications.Inbox(Engine(*pieces[::-1]))
    assert inbox.take() == {"me": [message]}


def test_of_others_and_incomplete(caplog):
    inbox = notifications.Inbox(Engine(b"plain", b"MKNIXLN1"))
    assert inbox.take() == {"10.0.0.1:1": [b"plain", b"MKNIXLN1"]}
    for index, count in ((0, 0), (3, 3), (0, 1 << 20)):
        odd = notifications._HEADER.pack(b"MKNIXLN1", 1, index, count, 0)
        assert notifications.Inbox(Engine(odd)).take() == {"10.0.0.1:1": [odd]}
    sender = notifications.Sender("me")
    halves = [sender.pieces("send_notif", bytes(100_000))[0] for _ in range(100)]
    inbox = notifications.Inbox(Engine(*halves))
    assert inbox.take() == {}
    assert len(inbox._incomplete["10.0.0.1:1"]) <= 64
    assert "never became complete" in caplog.text


def test_incomplete_ones_push_out_none_of_another_engine():
    message = addressed(200_000).tobytes()
    engine = Engine(notifications.Sender("me").pieces("send_notif", message)[0])
    inbox = notifications.Inbox(engine)
    assert inbox.take() == {}
    stranger = notifications.Sender("stranger")
    engine.name = "10.0.0.2:1"
    engine.received = [stranger.pieces("send_notif", bytes(100_000))[0] for _ in range(100)]
    assert inbox.take() == {}
    engine.name = "10.0.0.1:1"
    engine.received = notifications.Sender("me").pieces("send_notif", message)[1:]
    assert inbox.take() == {"me": [message]}
    assert [*inbox._incomplete] == ["10.0.0.2:1"]


def test_incomplete_ones_are_bounded_in_bytes_and_engines(monkeypatch):
    monkeypatch.setattr(notifications, "_MAX_INCOMPLETE_BYTES", 1 << 20)
    monkeypatch.setattr(notifications, "_MAX_ENGINES", 4)
    engine = Engine()
    inbox = notifications.Inbox(engine)
    for number in range(10):
        engine.name = f"10.0.0.{number}:1"
        sender = notifications.Sender("me")
        engine.received = [sender.pieces("send_notif", bytes(150_000))[0] for _ in range(40)]
        assert inbox.take() == {}
    assert [*inbox._incomplete] == [f"10.0.0.{number}:1" for number in range(6, 10)]
    assert {len(one) for one in inbox._incomplete.values()} == {16}


def test_what_strangers_send_is_logged_printable_and_short():
    assert shown("far\n\x1b[31mERROR \u202e") == r"far\n\x1b[31mERROR \u202e"
    assert len(shown("x" * 10_000)) == 400


def test_a_text_that_cannot_be_encoded(near):
    with pytest.raises(nixl_bind.nixlInvalidParamError, match="a text that can be encoded"):
        near.agent.send_notif("near", "\ud800")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_piece_fails_the_transfer(pair, monkeypatch, lost):
    """The transfer is not done without its notification, of which one piece was refused."""
    agent = pair.near.agent
    local, remote = sides(pair.near, pair.far)
    handle = agent.make_prepped_xfer("WRITE", local, [0], remote, [0], bytes(150_000))
    notify, num_sent = handle.job._notify, 0

    class Refused:
        done, ended_s = True, None

        def wait(self, timeout_s=None):
            raise TransferError("far", "its queue of notifications is full")

        def cancel(self):
            return False

    def dropping(*arguments, **options):
        nonlocal num_sent
        num_sent += 1
        ticket = notify(*arguments, **options)
        return Refused() if num_sent == lost + 1 else ticket

    handle.job._notify = dropping
    with pytest.raises(nixl_bind.nixlBackendError, match="queue of notifications is full"):
        agent.transfer(handle)
        settle(agent, handle)
    assert agent.check_xfer_state(handle) == "ERR"
    assert num_sent == 2
    agent.transfer(handle)
    assert settle(agent, handle) == "DONE"


def test_to_one_who_dies(caplog, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    with far_agent("far", "tcp") as far, near_agent("near", addressed(SIZE)) as near:
        near.agent.add_remote_agent(far.metadata)
        near.agent.send_notif("far", b"1")
        gathered(far.notifs)
        far.kill()
        with pytest.raises(nixl_bind.nixlNotFoundError, match="far"):
            for _ in range(10_000):
                near.agent.send_notif("far", b"2")
        assert "a notification to agent far failed" in caplog.text
