"""Ctrl-C during a wait: once it is raised, nothing writes to memory that is given back. Ctrl-C at
any bytecode of a put: no drain waits for it, and others may write its keys.
"""

import time
from concurrent.futures import wait
from pathlib import Path

import pytest

import mooncake_serving.rpc
import mooncake_serving.store
from mooncake_kernels.pool import PutResult
from mooncake_serving.rpc import Peers
from mooncake_serving.store import drain
from mooncake_serving.store.cluster import reads as remote

from ...interrupts import CtrlC
from ..support import eventually
from .support import replaced, value

FOLDER = str(Path(mooncake_serving.store.__file__).parent)
RPC_FOLDER = str(Path(mooncake_serving.rpc.__file__).parent)


class Interrupted(BaseException):
    """What a handler of a signal raises."""


class Ticket:
    """A transfer that never ends by itself, and during which a signal comes."""

    def __init__(self):
        self.calls = []

    def wait(self):
        self.calls.append("wait")
        raise Interrupted

    def cancel(self):
        self.calls.append("cancel")
        return True


@pytest.mark.parametrize("is_registered", [True, False])
def test_transfers_are_cancelled_before_their_memory_is_freed(hosts, is_registered, monkeypatch):
    one, two = hosts.make("one"), hosts.make("two", by_key=False)
    one.cluster.put("a", value(1))
    ticket, at_abort = Ticket(), []
    begin_key = two.store.begin_key

    def begin(*args, **options):
        put = begin_key(*args, **options)
        abort = put.abort
        put.abort = lambda: (at_abort.append(list(ticket.calls)), abort())
        return put

    monkeypatch.setattr(two.store, "begin_key", begin)
    monkeypatch.setattr(two.engine, "read", lambda *_, **__: ticket)
    if not is_registered:
        monkeypatch.setattr(two.node.memory, "_region_of", lambda *_: None)
    with pytest.raises(Interrupted):
        two.cluster.fetch(["a"])
    assert at_abort == [["wait", "cancel"]]
    assert two.store.stats().num_writing == 0


def test_memory_is_freed_only_after_all_holders_finish(hosts, monkeypatch):
    one, two, three = hosts.make("one"), hosts.make("two"), hosts.make("three", by_key=False)
    one.cluster.put("a", value(1))
    two.cluster.put("b", value(2))
    num_reading = []

    def read(original, *args, **options):
        num_reading.append(1)
        time.sleep(0.1)
        original(*args, **options)
        num_reading.pop()

    def interrupted(reads):
        monkeypatch.setattr(remote, "wait", wait)
        eventually(lambda: len(num_reading) == 2)
        raise Interrupted

    monkeypatch.setattr(remote, "wait", interrupted)
    with replaced(three.node.memory, "read", read):
        with pytest.raises(Interrupted):
            three.cluster.get_each(["a", "b"])
    assert num_reading == []


def test_interrupt_at_any_bytecode_of_a_use_leaves_no_user_of_a_peer(hosts):
    one, two = hosts.several(2)
    peers = Peers(one.engine)
    count, is_left = 0, True
    while is_left:
        count += 1
        used = []
        try:
            with CtrlC(RPC_FOLDER, count) as ctrl_c:
                peers.use(two.node.name, 5.0, used.append)
        except KeyboardInterrupt:
            pass
        is_left = ctrl_c.has_come
        peers.use(two.node.name, 5.0, used.append)  # it is usable after that
        peers.forget(two.node.name)
        assert not peers._users and all(peer.closed for peer in used), count
    assert count > 50
    peers.close()


def put_each(cluster, keys):
    return cluster.put_each(keys, [value(1), value(2)])


def begin_each(cluster, keys):
    puts = cluster.begin_each(keys, [1, 2])
    return [put if isinstance(put, PutResult) else put.commit() for put in puts]


@pytest.mark.parametrize(
    ("write", "has_pool"), [(put_each, True), (put_each, False), (begin_each, True)]
)
def test_interrupt_at_any_bytecode_of_a_put_leaks_nothing(hosts, write, has_pool):
    one, two = hosts.several(2)
    writer = one if has_pool else hosts.make("writer", 0)
    if not has_pool:
        writer.node.members(anew=True)
        two.node.set_draining(True)
        writer.node.members(anew=True)
    claims = writer.node.claims
    count, is_left = 0, True
    while is_left:
        count += 1
        keys = [f"{count} a", f"{count} b"]
        try:
            with CtrlC(FOLDER, count) as ctrl_c:
                write(writer.cluster, keys)
        except KeyboardInterrupt:  # whose traceback keeps what has been begun
            assert not writer.node.admission.is_used, count
        is_left = ctrl_c.has_come
        again = write(writer.cluster, keys)
        assert set(again) <= {PutResult.STORED, PutResult.EXISTS}, (count, again)
        claims.settle_left()
        assert not claims._writing and not hosts.directory._claims, count
        assert writer.cluster.remove_each(keys).all()
    assert count > 100
    two.node.set_draining(False)
    assert drain(one.node).has_left
