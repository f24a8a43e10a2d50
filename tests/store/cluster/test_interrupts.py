"""Ctrl-C during a wait: once it is raised, nothing writes to memory that is given back."""

import time
from concurrent.futures import wait

import pytest

from mooncake_serving.store.node import remote

from ..support import eventually
from .support import replaced, value


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
def test_what_is_under_way_is_cancelled_before_its_memory_is_given_back(
    hosts, is_registered, monkeypatch
):
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
        monkeypatch.setattr(two.node.memory, "covers", lambda *_: False)
    with pytest.raises(Interrupted):
        two.cluster.fetch(["a"])
    assert at_abort == [["wait", "cancel"]]
    assert two.store.stats().num_writing == 0


def test_all_holders_are_done_before_memory_is_given_back(hosts, monkeypatch):
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
        assert eventually(lambda: len(num_reading) == 2)
        raise Interrupted

    monkeypatch.setattr(remote, "wait", interrupted)
    with replaced(three.node._reader._mover, "read", read):
        with pytest.raises(Interrupted):
            three.cluster.get_each(["a", "b"])
    assert num_reading == []
