"""Stale entries: their engine is gone, or has been replaced by another."""

import dataclasses
import signal
import socket

import numpy as np
import pytest

from mooncake_kernels import metadata
from mooncake_kernels.errors import InvalidArgument, TransferError
from mooncake_kernels.metadata import Entry
from mooncake_kernels.transfer import TransferEngine

from ..transfer.handshake import answer
from .support import (
    TTL_S,
    WAIT_S,
    engine_process,
    eventually,
    free_port,
    names,
    put_entry,
    raw_server,
)

SIZE = 1 << 12
HERE = socket.gethostname()


@pytest.fixture(params=["local", "shm", "tcp"])
def engine(request, url):
    with TransferEngine(metadata=url, transports={request.param, "tcp"}) as engine:
        yield engine


def cause_of_opening(engine: TransferEngine, name: str) -> str:
    with pytest.raises(TransferError) as caught:
        engine.open(name, deadline_s=WAIT_S)
    assert caught.value.peer == name
    return caught.value.cause


def test_entry_is_stale_if_another_engine_has_its_address(engine, url):
    with TransferEngine("new", metadata=url) as new:
        with metadata.connect(url) as directory:
            entry = directory.lookup("new")
        put_entry(url, dataclasses.replace(entry, name="old", instance=entry.instance ^ 1))
        cause = cause_of_opening(engine, "old")
        assert cause.startswith(f"another engine answers there, at {new.address}, as ")
        assert cause.endswith(": its entry is stale")
        assert new.receive_notifications() == []
        assert engine.open("new").name == "new"


def test_unexpected_engine_receives_nothing_after_hello(url):
    heard = []

    def behave(connection):
        answer(connection)  # of instance 7
        heard.append(connection.recv(1))

    with raw_server(behave) as port, TransferEngine(metadata=url) as engine:
        for name, instance in (("raw:1", 7), ("i8", 8), ("another", 7)):
            put_entry(url, Entry(name, f"127.0.0.1:{port}", instance=instance, host=HERE))
            if name == "raw:1":  # as it says itself
                engine.open(name).close()
            else:
                assert "another engine answers there" in cause_of_opening(engine, name)
        eventually(lambda: heard == [b"", b"", b""], "something else was said")


def test_entry_is_stale_if_its_address_refuses_the_connection(engine, url):
    address = f"127.0.0.1:{free_port()}"
    put_entry(url, Entry("a", address, instance=5, host=HERE))
    cause = cause_of_opening(engine, "a")
    assert cause.startswith(f"connection refused, at {address}, as ")
    assert cause.endswith(": its entry is stale")


def test_loopback_address_of_another_machine_is_explained(engine, url):
    put_entry(url, Entry("a", f"127.0.0.1:{free_port()}", instance=5, host="elsewhere"))
    assert "an address within elsewhere; it should listen to" in cause_of_opening(engine, "a")
    with pytest.raises(InvalidArgument, match="name must be free"):  # it cannot be told from here
        TransferEngine("a", metadata=url)


def test_engine_on_another_machine_is_not_presumed_dead(url):
    put_entry(url, Entry("a", f"127.0.0.2:{free_port()}", instance=5, host="elsewhere"))
    put_entry(url, Entry("b", f"127.0.0.2:{free_port()}", instance=5, host=HERE))
    with pytest.raises(InvalidArgument, match="name must be free"):
        TransferEngine("a", metadata=url)
    TransferEngine("b", metadata=url).close()


def test_killed_engine_leaves_a_stale_entry(url):
    with engine_process(url, "a") as other, TransferEngine(metadata=url) as engine:
        memory = engine.register(np.ones(SIZE, np.uint8))
        peer = engine.open("a")
        row = (memory.address, other.region_address, SIZE)
        other.kill()
        with pytest.raises(TransferError):
            engine.write(peer, [row]).wait()
        assert "its entry is stale" in cause_of_opening(engine, "a")
        with TransferEngine("a", metadata=url) as successor:  # long before the entry expires
            target = successor.register(np.zeros(SIZE, np.uint8))
            with pytest.raises(TransferError):
                engine.write(peer, [row]).wait()
            engine.write(engine.open("a"), [(memory.address, target.address, SIZE)]).wait()
            assert (target._buffer.owner == 1).all()


def test_killed_engine_restarts_at_the_same_address(url):
    listen = f"127.0.0.1:{free_port()}"
    with TransferEngine(metadata=url) as engine:
        with engine_process(url, "a", listen) as other:
            peer = engine.open("a")
            row = (engine.register(np.ones(SIZE, np.uint8)).address, other.region_address, SIZE)
            other.kill()
        with engine_process(url, "a", listen) as again:
            assert again.address == listen
            causes = set()
            for _ in range(2):  # the first may find the old connection closed
                with pytest.raises(TransferError) as caught:
                    engine.write(peer, [row]).wait()
                causes.add(caught.value.cause)
            assert "the peer was restarted; open it again" in causes
            row = (row[0], again.region_address, SIZE)
            engine.write(engine.open("a"), [row]).wait()


def test_name_of_a_killed_engine_expires(url):
    with engine_process(url, "a", ttl_s=TTL_S) as other:
        eventually(lambda: names(url) == ["a"], "there is no entry")
        other.kill()
        eventually(lambda: names(url) == [], "the entry stays")
        with TransferEngine(metadata=url) as engine:
            assert "has no such name, or its time to live is over" in cause_of_opening(engine, "a")


def test_stopped_engine_loses_its_name_and_does_not_reclaim_it(url, caplog):
    with engine_process(url, "a", ttl_s=TTL_S) as other:
        other.stop()
        eventually(lambda: names(url) == [], "the entry stays")
        with TransferEngine("a", metadata=url) as successor:
            other.signal(signal.SIGCONT)
            other.close()  # does not remove what is not its own
            with metadata.connect(url) as directory:
                assert directory.lookup("a").instance == successor._engine.instance
