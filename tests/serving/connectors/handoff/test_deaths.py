"""A peer that is killed or stopped in the middle costs its requests alone, in bounded time."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_serving.connectors.handoff import Source
from tests.serving.connectors.handoff.rank import Rank, settings_of, source_of
from tests.transfer.support import eventually

ROOT = Path(__file__).parents[4]
SETTINGS = {"silence_s": 2.0, "deadline_s": 2.0, "num_slots": 2, "lease_s": 30.0}


class Child:
    """See child.py."""

    def __init__(self, role: str, transport: str):
        module = "tests.serving.connectors.handoff.child"
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, role, json.dumps(SETTINGS), transport],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        self.name = self.hear()

    def hear(self) -> str:
        return self.process.stdout.readline().strip()

    def do(self, *command: object, heard: str = "done") -> None:
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        assert self.hear() == heard

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(params=["tcp", "shm"])
def make(request):
    """Makes a child, or a rank of this process."""
    made: list = []

    def start(role: str, *, child: bool = False, **changes):
        if child:
            made.append(Child(role, request.param))
        else:
            settings = settings_of(**{**SETTINGS, **changes})
            made.append(Rank(role, settings=settings, transports=[request.param]))
        return made[-1]

    yield start
    for one in reversed(made):
        one.close()


def test_a_sender_that_is_killed(make):
    sender, receiver, other = make("sender", child=True), make("receiver"), make("sender")
    source = Source("P", [sender.name])
    receiver.ask("a", source, [1, 2, 3, 4], 64)
    sender.do("part", "a", [1, 2, 3, 4], 32, 64)
    assert eventually(lambda: not receiver.read([1, 2], 0, 32).isnan().any())
    sender.do("hold")
    sender.do("prefill", "b", [5, 6], 32, 0)
    receiver.ask("b", source, [5, 6], 32)
    assert sender.hear() == "held"  # a slot is granted to it
    sender.kill()
    other.prefill("c", [1, 2], 32)
    receiver.ask("c", source_of(other), [7, 8], 32)
    assert receiver.result("c") is None
    for prompt in "ab":
        assert sender.name in receiver.result(prompt)
    assert eventually(lambda: receiver.receiver.num_free_slots == 2)
    receiver.ask("d", source, [1], 10)
    assert sender.name in receiver.result("d")


def test_a_sender_that_is_stopped_and_writes_when_it_goes_on(make, monkeypatch):
    monkeypatch.setattr("mooncake_serving.connectors.handoff.receiver.REPLACE_S", 60.0)
    sender, receiver, other = make("sender", child=True), make("receiver"), make("sender")
    sender.do("hold")
    sender.do("prefill", "a", [1, 2], 32, 0)
    receiver.ask("a", Source("P", [sender.name]), [3, 4], 32)
    assert sender.hear() == "held"
    sender.send(signal.SIGSTOP)
    assert sender.name in receiver.result("a")
    other.prefill("b", [1, 2], 32)
    receiver.ask("b", source_of(other), [3, 4], 32)
    assert receiver.result("b") is None
    assert receiver.receiver.num_free_slots == 1  # the other one may still be written
    sender.process.stdin.write('["go"]\n')
    sender.process.stdin.flush()
    sender.send(signal.SIGCONT)
    assert eventually(lambda: receiver.receiver.num_free_slots == 2)
    assert receiver.holds("b", [3, 4], 32)


def test_a_slot_is_replaced_if_its_sender_does_not_answer(make):
    sender, other = make("sender", child=True), make("sender")
    receiver = make("receiver", num_slots=1, lease_s=1.0)
    [(old, region)] = receiver.receiver._slots
    sender.do("hold")
    sender.do("prefill", "a", [1, 2], 32, 0)
    receiver.ask("a", Source("P", [sender.name]), [3, 4], 32)
    assert sender.hear() == "held"
    sender.send(signal.SIGSTOP)
    assert sender.name in receiver.result("a")
    other.prefill("b", [1, 2], 32)
    receiver.ask("b", source_of(other), [3, 4], 32)
    assert receiver.result("b") is None  # by another slot: there was but one
    old.fill_(9)
    [fenced] = receiver.receiver._fenced.values()
    assert fenced.retired == [old]
    assert eventually(lambda: region._buffer is None)  # closed, on a thread of its own
    sender.process.stdin.write('["go"]\n')
    sender.process.stdin.flush()
    sender.send(signal.SIGCONT)
    assert eventually(lambda: not receiver.receiver._fenced)
    assert (old == 9).all()  # what it wrote was refused
    assert not fenced.retired
    assert receiver.holds("b", [3, 4], 32)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_receiver_that_is_killed_or_stopped(make, how):
    sender, receiver = make("sender", lease_s=3.0), make("receiver", child=True)
    other = make("receiver")
    receiver.do("ask", "a", sender.name, [1, 2, 3, 4], 64)
    sender.sender.offer("a", b"", 64)
    sender.sender.drop("a", "a new one follows")  # so that it has asked, and is known
    receiver.do("ask", "b", sender.name, [1, 2, 3, 4], 64)
    assert eventually(lambda: "b" in sender.sender._early)
    receiver.send(how)
    sender.prefill("b", [1, 2, 3, 4], 64, step=32)
    sender.released("b")
    sender.prefill("c", [5, 6], 32)
    other.ask("c", source_of(sender), [7, 8], 32)
    assert other.result("c") is None
    assert eventually(lambda: not sender.sender._asks)
