"""Peers that are opened late, unreachable, killed, restarted, removed; memory that is gone."""

import socket
import threading
import time

import pytest

from mooncake_serving.compat.nixl import _bindings as nixl_bind
from mooncake_serving.compat.nixl import metadata, remotes

from ..support import SIZE, addressed
from .support import far_agent, near_agent, settle, sides

LOST = nixl_bind.nixlRemoteDisconnectError


@pytest.fixture(params=["sm", "tcp"])
def apart(request, monkeypatch):
    monkeypatch.setenv("UCX_TLS", request.param)
    with far_agent("far", request.param) as far, near_agent("near", addressed(SIZE)) as near:
        yield near, far


def error_of(agent, handle) -> Exception:
    with pytest.raises(Exception) as raised:
        agent.transfer(handle)
        settle(agent, handle)
    return raised.value


def test_a_killed_peer(apart):
    near, far = apart
    agent = near.agent
    local, remote = sides(near, far)
    handle = agent.make_prepped_xfer("READ", local, [0], remote, [0])
    agent.transfer(handle)
    assert settle(agent, handle) == "DONE"
    assert agent.check_remote_metadata("far")
    far.kill()
    error = error_of(agent, handle)
    assert isinstance(error, LOST), error
    assert agent.check_xfer_state(handle) == "ERR"
    assert not agent.check_remote_metadata("far")
    with pytest.raises(nixl_bind.nixlNotFoundError, match="far"):
        agent.make_prepped_xfer("READ", local, [0], remote, [0])
    with pytest.raises(nixl_bind.nixlNotFoundError, match="far"):
        agent.transfer(handle)
    with pytest.raises(nixl_bind.nixlNotFoundError, match="far"):
        agent.send_notif("far", b"anyone?")
    agent.release_xfer_handle(handle)


def test_killed_in_the_middle(apart):
    near, far = apart
    agent = near.agent
    local, remote = sides(near, far)
    every = range(SIZE // 4096)
    handle = agent.make_prepped_xfer("READ", local, every, remote, every)
    agent.transfer(handle)
    settle(agent, handle)
    with pytest.raises(Exception) as raised:
        far.process.kill()
        for _ in range(10_000):
            agent.transfer(handle)
            settle(agent, handle)
    assert isinstance(raised.value, LOST), raised.value
    assert agent.check_xfer_state(handle) == "ERR"


def test_a_restarted_peer_is_another(apart, monkeypatch):
    near, far = apart
    agent = near.agent
    local, remote = sides(near, far)
    handle = agent.make_prepped_xfer("WRITE", local, [0], remote, [0])
    agent.transfer(handle)
    settle(agent, handle)
    far.kill()
    with far_agent("far") as new:
        if agent.check_remote_metadata("far"):
            with pytest.raises(nixl_bind.nixlNotAllowedError, match="remove_remote_agent"):
                agent.add_remote_agent(new.metadata)
        agent.remove_remote_agent("far")
        _, remote = sides(near, new)
        handle = agent.make_prepped_xfer("WRITE", local, [0], remote, [0])
        agent.transfer(handle)
        assert settle(agent, handle) == "DONE"


def changed(far, **fields) -> bytes:
    body = metadata.decode_metadata(far.metadata)
    for name, value in fields.items():
        setattr(body, name, value)
    return metadata.encode_metadata(body)


def test_no_one_is_there(apart):
    near, far = apart
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        far.metadata = changed(far, address=address)
        local, remote = sides(near, far)
        handle = near.agent.make_prepped_xfer("READ", local, [0], remote, [0])
        error = error_of(near.agent, handle)
    assert isinstance(error, LOST)
    assert near.agent.check_xfer_state(handle) == "ERR"


def test_opening_does_not_block(apart, monkeypatch):
    """A listener that never answers: PROC until the deadline, then ERR; release ends it at once."""
    near, far = apart
    monkeypatch.setattr(remotes, "MAX_OPEN_S", 1.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        far.metadata = changed(far, address=f"127.0.0.1:{silent.getsockname()[1]}")
        local, remote = sides(near, far)
        first, second = (
            near.agent.make_prepped_xfer("READ", local, [i], remote, [i]) for i in range(2)
        )
        near.agent.make_connection("far")
        assert near.agent.transfer(first) == "PROC"
        assert near.agent.transfer(second) == "PROC"
        near.agent.send_notif("far", b"hello?")
        with pytest.raises(nixl_bind.nixlRepostActiveError):
            near.agent.transfer(first)
        near.agent.release_xfer_handle(second)
        with pytest.raises(LOST):
            settle(near.agent, first)
        assert near.agent.check_xfer_state(first) == "ERR"


def test_transfers_wait_in_order_until_the_peer_is_open(apart):
    near, far = apart
    local, remote = sides(near, far)
    handles = [
        near.agent.make_prepped_xfer("WRITE", local, [i], remote, [0], str(i).encode())
        for i in range(20)
    ]
    for handle in handles:
        near.agent.transfer(handle)
    for handle in handles:
        assert settle(near.agent, handle) == "DONE"
    messages = far.notifs()["near"]
    assert messages == [str(i).encode() for i in range(20)]


def test_loopback_addresses_of_another_machine(apart):
    near, far = apart
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        far.metadata = changed(far, address=address, machine="elsewhere")
        local, remote = sides(near, far)
        handle = near.agent.make_prepped_xfer("READ", local, [0], remote, [0])
        error = error_of(near.agent, handle)
    assert "MOONCAKE_KERNELS_LISTEN_HOST" in str(error)


def test_removed_while_in_use(apart):
    near, far = apart
    local, remote = sides(near, far)
    handle = near.agent.make_prepped_xfer("READ", local, [0], remote, [0])
    near.agent.remove_remote_agent("far")
    near.agent.remove_remote_agent("far")
    near.agent.remove_remote_agent("nobody")
    with pytest.raises(nixl_bind.nixlNotFoundError, match="removed or lost|remote agent"):
        near.agent.transfer(handle)
    near.agent.add_remote_agent(far.metadata)
    with pytest.raises(nixl_bind.nixlNotFoundError, match="removed or lost"):
        near.agent.transfer(handle)
    with pytest.raises(nixl_bind.nixlNotFoundError, match="prepare it again"):
        near.agent.make_prepped_xfer("READ", local, [0], remote, [0])


def test_memory_that_is_no_longer_registered_there(apart):
    near, far = apart
    local, remote = sides(near, far)
    handle = near.agent.make_prepped_xfer("READ", local, [0], remote, [0])
    far.call("deregister")
    error = error_of(near.agent, handle)
    assert isinstance(error, nixl_bind.nixlBackendError)
    assert "registered" in str(error)
    assert near.agent.check_xfer_state(handle) == "ERR"
    assert near.agent.check_remote_metadata("far")  # as of what it told


def test_memory_that_is_no_longer_registered_here(apart):
    near, far = apart
    local, remote = sides(near, far)
    handle = near.agent.make_prepped_xfer("READ", local, [0], remote, [0])
    near.agent.deregister_memory(near.agent.get_reg_descs([(near.address, SIZE, 0, "")], "DRAM"))
    error = error_of(near.agent, handle)
    assert isinstance(error, nixl_bind.nixlInvalidParamError)


def test_a_closed_agent(apart):
    near, far = apart
    local, remote = sides(near, far)
    handle = near.agent.make_prepped_xfer("READ", local, [0], remote, [0])
    near.agent.transfer(handle)
    settle(near.agent, handle)
    near.close()
    near.close()
    time.sleep(0.01)
    error = error_of(near.agent, handle)
    assert isinstance(
        error,
        nixl_bind.nixlCancelledError
        | nixl_bind.nixlInvalidParamError
        | nixl_bind.nixlNotFoundError,
    )


def test_an_unforeseen_error_is_of_one_transfer_alone(apart):
    """Those that wait after it are carried out, and the agent stays usable."""
    near, far = apart
    local, remote = sides(near, far)
    handles = [near.agent.make_prepped_xfer("WRITE", local, [i], remote, [i]) for i in range(4)]

    def fails(*arguments, **options):
        raise MemoryError("none left")

    def starts(peer):
        raise KeyError("unforeseen")

    handles[0].job.start = starts  # in the thread that opens the peer
    handles[1].job._move = fails
    for handle, match in zip(handles[:2], ["unforeseen", "none left"], strict=True):
        with pytest.raises(nixl_bind.nixlBackendError, match=match):
            near.agent.transfer(handle)
            settle(near.agent, handle)
    for handle in handles[2:]:
        near.agent.transfer(handle)
        assert settle(near.agent, handle) == "DONE"


def test_no_thread_is_left_to_open_a_peer(apart, monkeypatch):
    near, far = apart
    local, remote = sides(near, far)
    handle = near.agent.make_prepped_xfer("WRITE", local, [0], remote, [0])

    def start(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(nixl_bind.nixlBackendError, match="can't start new thread"):
            near.agent.transfer(handle)
    near.agent.transfer(handle)
    assert settle(near.agent, handle) == "DONE"
