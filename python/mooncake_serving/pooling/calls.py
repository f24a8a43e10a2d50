"""Requests of this instance to others, and their answers."""

import secrets
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import Ticket

from .buffers import Descriptors
from .errors import CreditorFailed
from .messages import Answer, Refused, Request
from .peers import Peers

A = TypeVar("A", bound=Answer)


@dataclass(eq=False)
class Call:
    """A request under way."""

    name: str  # of the instance that was asked
    number: int
    started_s: float
    future: Future[Answer] = field(default_factory=Future)
    ticket: Ticket | None = None


class Calls:
    """Send requests, all before the first answer is waited for. Thread-safe.

    Args:
        peers: the instances.
        answer_s: how long an answer may take.
    """

    def __init__(self, peers: Peers, answer_s: float):
        self._peers, self._answer_s = peers, answer_s
        self._numbers = count(secrets.randbits(62))  # unlike those of an earlier life of this name
        self._calls: dict[int, Call] = {}
        self._lock = threading.Lock()

    def next_number(self) -> int:
        """Return a number that no other request has."""
        with self._lock:
            return next(self._numbers)

    def start(
        self, name: str, request: Request, descriptors: Descriptors = (), *, may_open: bool = True
    ) -> Call:
        """Write data to an instance and ask it for something; see ``Peers.send``.

        Raises:
            CreditorFailed: it cannot be reached.
        """
        call = Call(name, request.number, time.monotonic())
        with self._lock:
            self._calls[call.number] = call
        try:
            call.ticket = self._peers.send(name, request, descriptors, may_open=may_open)
        except BaseException as error:
            self.end(call)
            if isinstance(error, TransferError):
                self._peers.drop(name)
                raise CreditorFailed(name, error.cause) from error
            raise
        return call

    def wait(self, call: Call, expected: type[A]) -> A:
        """Wait for the answer of a call, which is over then.

        Raises:
            CreditorFailed: it did not arrive, or it is another.
        """
        try:
            if call.ticket is not None:
                call.ticket.wait()
            answer = call.future.result(self._seconds_left(call))
        except TransferError as error:
            self._peers.drop(call.name)
            raise CreditorFailed(call.name, error.cause) from error
        except NoAnswer:
            raise CreditorFailed(call.name, f"no answer in {self._answer_s:g} s") from None
        finally:
            self.end(call)
        if isinstance(answer, Refused):
            raise CreditorFailed(call.name, answer.reason)
        if not isinstance(answer, expected):
            raise CreditorFailed(call.name, f"answers with {type(answer).__name__}")
        return answer

    def is_under_way(self, call: Call) -> bool:
        """Tell whether an answer may still come.

        Raises:
            CreditorFailed: the request was not delivered.
        """
        if call.future.done() or self._seconds_left(call) == 0:
            return False
        try:
            if call.ticket is not None and call.ticket.done:
                call.ticket.wait()
        except TransferError as error:
            raise CreditorFailed(call.name, error.cause) from error
        return True

    def end(self, call: Call) -> None:
        """Forget a call: its answer is ignored. Idempotent."""
        with self._lock:
            self._calls.pop(call.number, None)

    def take_answer(self, sender: str, answer: Answer) -> None:
        """Hand an answer to the call that waits for it, if it is from the instance asked."""
        with self._lock:
            call = self._calls.get(answer.number)
        if call is not None and call.name == sender and not call.future.done():
            call.future.set_result(answer)

    def fail(self, name: str, cause: str) -> None:
        """Fail all calls to an instance that cannot be reached."""
        self._peers.drop(name)
        with self._lock:
            calls = [call for call in self._calls.values() if call.name == name]
        for call in calls:
            if not call.future.done():
                call.future.set_exception(CreditorFailed(name, cause))

    def _seconds_left(self, call: Call) -> float:
        return max(0.0, call.started_s + self._answer_s - time.monotonic())
