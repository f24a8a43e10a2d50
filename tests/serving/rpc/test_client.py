"""Requests find their answers, or fail with a reason; nothing is left of either."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from mooncake_kernels.errors import FailureKind, TransferError
from mooncake_kernels.transfer import TransferEngine
from mooncake_serving.rpc import Peers, Receiver, Refused, RpcClient
from tests.waiting import eventually

from .support import CODEC, WAIT_S, Add, Sum

NOWHERE = "127.0.0.1:1"
ENGINE = """
import mooncake_kernels as mk

with mk.TransferEngine(transports=["tcp"]) as engine:
    print(engine.name, flush=True)
    input()
"""


def take_responses(client):
    """The thread of the side that asks."""

    def take(sender, data):
        client.take_response(sender, CODEC.decode(data))

    return Receiver(client.peers.engine, take, lambda: None, lambda: 0.01, "answers")


@pytest.fixture
def serve(made):
    """``serve(answer)``: the second engine answers as it says; None: not at all."""
    receivers = [take_responses(made.client)]
    answers = RpcClient(Peers(made.asked), CODEC.encode)

    def start(answer):
        def take(sender, data):
            message = answer(CODEC.decode(data))
            if message is not None:
                answers.send(sender, message, WAIT_S)

        receivers.append(Receiver(made.asked, take, lambda: None, lambda: 0.01, "serves"))

    yield start
    for receiver in receivers:
        receiver.close()
    answers.peers.close()


def add(request):
    return Sum(request.number, sum(request.numbers))


def request(client, *numbers):
    return Add(client.next_number(), numbers)


def test_each_call_gets_its_own_response(made, serve):
    serve(add)

    def ask(i):
        return made.client.call(made.name, request(made.client, i, 1), Sum, WAIT_S).total

    with ThreadPoolExecutor(8) as executor:
        assert list(executor.map(ask, range(100))) == list(range(1, 101))
    assert not made.client._calls


def test_calls_run_concurrently(made, serve):
    serve(add)
    calls = [made.client.start(made.name, request(made.client, i), WAIT_S) for i in range(5)]
    assert [made.client.wait(call, Sum).total for call in calls[::-1]] == [4, 3, 2, 1, 0]


@pytest.mark.parametrize(
    "answer, deadline_s, cause",
    [
        (lambda r: None, 1.0, "add: no answer in 1 s"),
        (lambda r: Sum(r.number + 1, 0), 1.0, "add: no answer in 1 s"),
        (lambda r: Refused(r.number, "not today"), WAIT_S, "add: not today"),
        (lambda r: Add(r.number, ()), WAIT_S, "add: the answer is Add"),
    ],
)
def test_failed_call_reports_its_cause(made, serve, answer, deadline_s, cause):
    serve(answer)
    with pytest.raises(TransferError) as raised:
        made.client.call(made.name, request(made.client), Sum, deadline_s)
    assert (raised.value.peer, raised.value.cause) == (made.name, cause)
    assert raised.value.timed_out == ("no answer" in cause)
    assert not made.client._calls and made.peers.is_open(made.name)


def test_a_response_counts_once_and_only_from_the_engine_asked(made):
    call = made.client.start(made.name, request(made.client), WAIT_S)
    assert not made.client.take_response("another", Sum(call.number, 1))
    assert not made.client.take_response(made.name, Sum(call.number + 1, 2))
    assert made.client.take_response(made.name, Sum(call.number, 3))
    assert not made.client.take_response(made.name, Sum(call.number, 4))
    assert made.client.wait(call, Sum).total == 3


def test_response_to_an_ended_call_is_ignored(made):
    call = made.client.start(made.name, request(made.client), WAIT_S)
    made.client.end(call)
    made.client.end(call)
    assert not made.client.take_response(made.name, Sum(call.number, 1))


def test_data_arrives_before_the_request(made):
    source, target = bytearray(b"queries"), bytearray(7)
    with made.asking.register(source) as here, made.asked.register(target) as there:
        ticket = made.client.post(
            made.name, request(made.client), WAIT_S, [(here.address, there.address, 7)]
        )
        ticket.wait()
        [(sender, data)] = made.asked.receive_notifications(WAIT_S)
        assert target == b"queries" and sender == made.asking.name
        assert CODEC.decode(data).numbers == ()


def test_call_is_pending_until_response_or_deadline(made):
    call = made.client.start(made.name, request(made.client), WAIT_S)
    eventually(lambda: call.ticket.done)
    assert made.client.is_under_way(call)
    made.client.take_response(made.name, Sum(call.number, 1))
    assert not made.client.is_under_way(call)
    late = made.client.start(made.name, request(made.client), 0.01)
    eventually(lambda: not late.seconds_left)
    assert not made.client.is_under_way(late)
    made.client.end(late)


def test_undelivered_request_fails_and_drops_its_connection(made):
    made.client.send(made.name, request(made.client), WAIT_S)
    with made.asking.register(bytearray(8)) as here:
        data = [(here.address, 4096, 8)]  # which is not registered over there
        for finish in (made.client.is_under_way, lambda call: made.client.wait(call, Sum)):
            call = made.client.start(made.name, request(made.client), WAIT_S, data)
            eventually(lambda call=call: call.ticket.done)
            with pytest.raises(TransferError):
                finish(call)
            assert not made.peers.is_open(made.name)
            made.client.end(call)
    assert not made.client._calls and not made.peers._users


def test_unreachable_peer_is_reported_by_name(made):
    for name in (NOWHERE, "no name"):
        for send in (
            lambda name: made.client.call(name, request(made.client), Sum, WAIT_S),
            lambda name: made.client.send(name, request(made.client), WAIT_S),
            lambda name: made.client.post(name, request(made.client), WAIT_S),
        ):
            with pytest.raises(TransferError) as raised:
                send(name)
            assert raised.value.peer == name
    assert not made.client._calls


def test_unconnected_peer_is_not_opened_if_forbidden(made):
    with pytest.raises(TransferError, match="it is not connected"):
        made.client.post(made.name, request(made.client), WAIT_S, may_open=False)
    with pytest.raises(TransferError, match="it is not connected"):
        made.client.start(made.name, request(made.client), WAIT_S, may_open=False)
    made.client.send(made.name, request(made.client), WAIT_S)
    made.client.end(made.client.start(made.name, request(made.client), WAIT_S, may_open=False))


def test_failing_some_calls_leaves_the_others_pending(made, serve):
    with TransferEngine(transports=["tcp"]) as third:
        lost = made.client.start(third.name, request(made.client), WAIT_S)
        kept = made.client.start(made.name, request(made.client, 1, 2), WAIT_S)
        made.client.fail(lambda call: call.name == third.name, "it is gone", FailureKind.GONE)
        with pytest.raises(TransferError, match="it is gone"):
            made.client.wait(lost, Sum)
        serve(add)
        assert made.client.wait(kept, Sum).total == 3


@pytest.mark.parametrize("is_closed", [False, True])
def test_undelivered_calls_fail_too(made, is_closed):
    command = [sys.executable, "-c", ENGINE]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        try:
            name = process.stdout.readline().strip()
            made.client.send(name, request(made.client), WAIT_S)
            os.kill(process.pid, signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)  # until all its threads have stopped
            call = made.client.start(name, request(made.client), WAIT_S)
            end = made.client.close if is_closed else lambda: made.client.fail(bool, "it is gone")
            ending = threading.Timer(0.05, end)
            ending.start()
            with pytest.raises(TransferError, match="this side was closed|it is gone"):
                made.client.wait(call, Sum)
            ending.join()
        finally:
            process.kill()
    assert not made.peers.is_open(name)


def test_close_fails_pending_and_later_calls(made):
    waiting = made.client.start(made.name, request(made.client), WAIT_S)
    closing = threading.Timer(0.05, made.client.close)
    closing.start()
    with pytest.raises(TransferError, match="this side was closed"):
        made.client.wait(waiting, Sum)
    closing.join()
    for name in (made.name, NOWHERE):
        with pytest.raises(TransferError, match="this side was closed"):
            made.client.call(name, request(made.client), Sum, WAIT_S)
    assert not made.client._calls


def test_call_failed_while_connecting_is_not_sent(made, monkeypatch):
    open_peer = made.asking.open

    def open_and_fail(name, **options):
        made.client.fail(bool, "it is gone")
        return open_peer(name, **options)

    monkeypatch.setattr(made.asking, "open", open_and_fail)
    with pytest.raises(TransferError, match="it is gone"):
        made.client.start(made.name, request(made.client), WAIT_S)
    assert made.asked.receive_notifications(0) == []
    assert not made.client._calls and not made.peers._users


def test_call_numbers_are_unique_across_clients(made):
    numbers = [made.client.next_number() for _ in range(3)]
    assert numbers == [numbers[0], numbers[0] + 1, numbers[0] + 2]
    assert RpcClient(made.peers, CODEC.encode).next_number() not in numbers
