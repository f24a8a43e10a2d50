"""Requests to other nodes, and their answers."""

import itertools
import secrets
import threading
import time
from collections.abc import Container
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine

from .messages import Answer, Message, Refused, Request, encode
from .peers import Peers

A = TypeVar("A", bound=Answer)
R = TypeVar("R", bound=Request)


@dataclass(frozen=True)
class _Waiting:
    """A request that was not answered yet."""

    name: str  # of the node that was asked
    since: float
    future: Future[Answer] = field(default_factory=Future)

    def fail(self, cause: str) -> None:
        if not self.future.done():
            self.future.set_exception(TransferError(self.name, cause))


class Calls:
    """Requests of this node to others. Thread-safe.

    Attributes:
        life: of this node, see ``Request``.
    """

    def __init__(self, engine: TransferEngine, peers: Peers):
        self.life = secrets.randbits(62)
        self._engine = engine
        self._peers = peers
        # Far from the numbers of other nodes, some of which come back as tokens.
        self._numbers = itertools.count(secrets.randbits(60))
        self._waiting: dict[int, _Waiting] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def next_number(self) -> int:
        return next(self._numbers)

    def make(self, kind: type[R], valid_s: float, *, number: int | None = None, **fields: Any) -> R:
        """Make a request of this node."""
        number = self.next_number() if number is None else number
        return kind(number, self.life, int(valid_s * 1000), **fields)

    def ask(
        self,
        name: str,
        kind: type[Request],
        expected: type[A],
        deadline_s: float,
        *,
        valid_s: float | None = None,
        number: int | None = None,
        **fields: Any,
    ) -> A:
        """Send a request to a node, and wait for its answer.

        Args:
            name: of its engine.
            kind: of request.
            expected: kind of answer.
            deadline_s: seconds until the answer must be here.
            valid_s: for how long the other node shall regard the request; None: ``deadline_s``.
            number: of the request; None: the next.
            **fields: of the request.

        Raises:
            TransferError: the node cannot be reached, refuses, or does not answer in time. The
                request may have been carried out.
        """
        until = time.monotonic() + deadline_s
        request = self.make(
            kind, deadline_s if valid_s is None else valid_s, number=number, **fields
        )
        waiting = _Waiting(name, time.monotonic())
        with self._lock:
            if self._is_closed:
                raise TransferError(name, "the node was closed")
            self._waiting[request.number] = waiting
        try:
            self.tell(name, cast(Message, request), deadline_s)
            answer = waiting.future.result(max(0.0, until - time.monotonic()))
        except NoAnswer:
            what = f"{kind.__name__.lower()}: no answer in {deadline_s:g} s"
            raise TransferError(name, what, timed_out=True) from None
        finally:
            with self._lock:
                del self._waiting[request.number]
        if isinstance(answer, Refused):
            raise TransferError(name, f"{kind.__name__.lower()}: {answer.reason}")
        if not isinstance(answer, expected):
            raise TransferError(name, f"{kind.__name__.lower()}: an answer to something else")
        return answer

    def tell(self, name: str, message: Message, deadline_s: float) -> None:
        """Send a message, and wait until it is in the receiver's queue.

        Raises:
            TransferError: it is not, or that is unknown.
        """
        with self._peers.lease(name, deadline_s) as peer:
            self._engine.write(peer, [], notify=encode(message), deadline_s=deadline_s).wait()

    def post(self, name: str, message: Message, deadline_s: float) -> None:
        """Send a message, without waiting for it or learning whether it arrived.

        Raises:
            TransferError: the node cannot be reached.
        """
        with self._peers.lease(name, deadline_s) as peer:
            self._engine.write(peer, [], notify=encode(message), deadline_s=deadline_s)

    def take_answer(self, sender: str, answer: Answer) -> bool:
        """Hand an answer to its waiter; returns whether there was one, for that node's answer."""
        with self._lock:
            waiting = self._waiting.get(answer.number)
            if waiting is None or waiting.name != sender or waiting.future.done():
                return False
            waiting.future.set_result(answer)
            return True

    def give_up(self, living: Container[str], grace_s: float) -> None:
        """Fail requests to nodes that are not members, unless they were just sent.

        A directory that was restarted does not know its members yet.
        """
        before = time.monotonic() - grace_s
        with self._lock:
            for waiting in self._waiting.values():
                if waiting.name not in living and waiting.since < before:
                    waiting.fail("it is no member any more")

    def close(self) -> None:
        """Fail all pending requests, and all later ones. Idempotent."""
        with self._lock:
            self._is_closed = True
            for waiting in self._waiting.values():
                waiting.fail("the node was closed")
