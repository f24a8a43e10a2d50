"""Requests of this process to others, their answers, and the thread that takes what arrives."""

import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NoAnswer
from typing import Any, TypeVar

from mooncake_kernels.errors import FailureKind, InvalidArgument, TransferError
from mooncake_kernels.transfer import Peer, Ticket, TransferEngine

from .messages import Message, Refused
from .peers import Lease, Peers

logger = logging.getLogger(__name__)

A = TypeVar("A", bound=Message)
Descriptors = Sequence[tuple[int, int, int]]


class Call:
    """A request under way.

    Attributes:
        name: of the engine that was asked.
        number: of the request.
        started_s: when it was begun, by ``time.monotonic``.
        ticket: of the request's delivery; None until it is sent.
        future: its answer.
    """

    def __init__(self, name: str, request: Message, deadline_s: float):
        self.name, self.number = name, request.number
        self.what = type(request).__name__.lower()
        self.started_s, self.deadline_s = time.monotonic(), deadline_s
        self.ticket: Ticket | None = None
        self.future: Future[Message] = Future()
        self.lease: Lease | None = None

    @property
    def failure(self) -> BaseException | None:
        """Why there will be no answer; None if there may be, or is."""
        return self.future.exception() if self.future.done() else None

    def stop_delivery(self) -> None:
        """If the call has failed, no one waits until its request is delivered."""
        if self.failure is not None and self.ticket is not None:
            self.ticket.cancel()

    @property
    def seconds_left(self) -> float:
        """How long the answer may still take."""
        return max(0.0, self.started_s + self.deadline_s - time.monotonic())


class RpcClient:
    """Requests to other engines. Thread-safe.

    All methods that send raise ``TransferError`` if the other side cannot be reached.

    Args:
        peers: connections to them.
        encode: makes bytes of a message.
    """

    def __init__(self, peers: Peers, encode: Callable[[Any], bytes]):
        self.peers = peers
        self._encode = encode
        # Far from the numbers of others, and of an earlier process of this name.
        self._numbers = itertools.count(secrets.randbits(62))
        self._calls: dict[int, Call] = {}  # that were not answered yet
        self._lock = threading.Lock()
        self._is_closed = False

    def next_number(self) -> int:
        """Return a number that no other request has."""
        return next(self._numbers)

    def call(self, name: str, request: Message, expected: type[A], deadline_s: float) -> A:
        """Send a request, and wait for its answer; see ``start`` and ``wait``.

        If the engine turns out to be gone, the one that has its name now is asked.
        """
        call = self.start(name, request, deadline_s)
        try:
            return self.wait(call, expected)
        except TransferError as error:
            if error.kind is not FailureKind.GONE:
                raise
        return self.wait(self.start(name, request, deadline_s), expected)

    def start(
        self,
        name: str,
        request: Message,
        deadline_s: float,
        descriptors: Descriptors = (),
        *,
        may_open: bool = True,
    ) -> Call:
        """Write data to an engine, and ask it for something, without waiting for either.

        Args:
            name: of the engine.
            request: with a number that no other has.
            deadline_s: seconds until the answer must be here.
            descriptors: what to write before it is asked.
            may_open: whether it is connected to first if necessary, which may take as long.

        Returns:
            A call, to be waited for or ended.
        """
        call = Call(name, request, deadline_s)
        try:
            with self._lock:
                if self._is_closed:
                    raise TransferError(name, "this side was closed", kind=FailureKind.CLOSED)
                self._calls[call.number] = call
            call.lease = self.peers.lease(name, deadline_s, may_open=may_open)
            if call.failure is not None:  # while the peer was connected to
                raise call.failure
            call.ticket = self._write(call.lease.peer, request, deadline_s, descriptors)
            call.stop_delivery()  # it may have failed meanwhile
        except BaseException as error:
            self.end(call, error)
            raise
        return call

    def wait(self, call: Call, expected: type[A]) -> A:
        """Wait for the answer of a call, which is over then.

        Args:
            call: that was started.
            expected: kind of answer.

        Raises:
            TransferError: the request was not delivered or is refused, or there is no answer in
                time. It may have been carried out.
        """
        try:
            self._wait_until_delivered(call)
            answer = call.future.result(call.seconds_left)
        except NoAnswer:
            cause = f"{call.what}: no answer in {call.deadline_s:g} s"
            raise TransferError(call.name, cause, kind=FailureKind.TIMED_OUT) from None
        finally:
            self.end(call)
        if isinstance(answer, Refused):
            cause = f"{call.what}: {answer.reason}"
            raise TransferError(call.name, cause, kind=FailureKind.REFUSED)
        if not isinstance(answer, expected):
            cause = f"{call.what}: the answer is {type(answer).__name__}"
            raise TransferError(call.name, cause, kind=FailureKind.INCOMPATIBLE)
        return answer

    def is_under_way(self, call: Call) -> bool:
        """Tell whether an answer may still come.

        Raises:
            TransferError: the request was not delivered.
        """
        if call.future.done() or call.seconds_left == 0:
            return False
        if call.ticket is not None and call.ticket.done:
            self._wait_until_delivered(call)
        return True

    def end(self, call: Call, error: BaseException | None = None) -> None:
        """Forget a call: its answer is ignored. ``error``: what has ended it. Idempotent."""
        with self._lock:
            self._calls.pop(call.number, None)
        if call.lease is not None:
            call.lease.end(error)

    def send(self, name: str, message: Message, deadline_s: float) -> None:
        """Send a message, and wait until it is in the receiver's queue, as ``Peers.use`` does.

        Raises:
            TransferError: it is not, or that is unknown.
        """
        self.peers.use(name, deadline_s, lambda peer: self._write(peer, message, deadline_s).wait())

    def post(
        self,
        name: str,
        message: Message,
        deadline_s: float,
        descriptors: Descriptors = (),
        *,
        may_open: bool = True,
    ) -> Ticket:
        """Write data and send a message, without waiting; the arguments are those of ``start``.

        Its ticket alone tells of a failure: that peer is used further, until something else fails.
        """
        with self.peers.lease(name, deadline_s, may_open=may_open) as peer:
            return self._write(peer, message, deadline_s, descriptors)

    def take_response(self, sender: str, answer: Message) -> bool:
        """Hand an answer to its call; returns whether there was one, to that engine."""
        with self._lock:
            call = self._calls.get(answer.number)
            if call is None or call.name != sender:
                return False
            del self._calls[answer.number]
        call.future.set_result(answer)
        return True

    def fail(
        self,
        is_lost: Callable[[Call], bool],
        cause: str,
        kind: FailureKind = FailureKind.GONE,
    ) -> None:
        """Fail all calls that have no answer yet and meet a condition, even undelivered ones."""
        with self._lock:
            lost = [call for call in self._calls.values() if is_lost(call)]
            for call in lost:
                del self._calls[call.number]
        for call in lost:
            call.future.set_exception(TransferError(call.name, cause, kind=kind))
            call.stop_delivery()

    def close(self) -> None:
        """Fail all calls, and all later ones. Idempotent."""
        with self._lock:
            self._is_closed = True
        self.fail(lambda _: True, "this side was closed", FailureKind.CLOSED)

    def _write(
        self, peer: Peer, message: Message, deadline_s: float, descriptors: Descriptors = ()
    ) -> Ticket:
        notify = self._encode(message)
        try:
            return self.peers.engine.write(peer, descriptors, notify=notify, deadline_s=deadline_s)
        except InvalidArgument as error:  # the peer was closed meanwhile
            raise TransferError(peer.name, str(error), kind=FailureKind.CLOSED) from error

    def _wait_until_delivered(self, call: Call) -> None:
        assert call.lease is not None and call.ticket is not None, "it was started"
        with call.lease:
            try:
                call.ticket.wait()
            except TransferError as error:
                raise call.failure or error from None


class Receiver:
    """Takes the notifications of an engine, all of which are its owner's, on one thread.

    Whatever is wrong with one of them is logged, and the others are taken.

    Args:
        engine: whose notifications are taken.
        take: called with the sender's name and the bytes of each; ``InvalidArgument``: the sender
            did something wrong.
        tend: called several times a second.
        poll_s: tells how long ``tend``, and closing, may have to wait at most.
        thread_name: of the thread.
    """

    def __init__(
        self,
        engine: TransferEngine,
        take: Callable[[str, bytes], object],
        tend: Callable[[], object],
        poll_s: Callable[[], float],
        thread_name: str,
    ):
        self._engine, self._take, self._tend, self._poll_s = engine, take, tend, poll_s
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=thread_name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_over.is_set()

    def close(self) -> None:
        """Stop: what has arrived by then is taken, and what comes later refused. Idempotent."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                received = self._engine.receive_notifications(self._poll_s())
                try:
                    self._tend()
                except Exception:
                    logger.exception("%s fails between two messages", self._engine.name)
                self._take_each(received)
            self._take_each(self._engine.refuse_notifications())
        except InvalidArgument as error:  # the engine was closed
            logger.warning("%s hears no longer: %s", self._engine.name, error)

    def _take_each(self, received: list[tuple[str, bytes]]) -> None:
        for sender, data in received:
            try:
                self._take(sender, data)
            except InvalidArgument as error:
                logger.warning("from %s: %s", sender, error)
            except Exception:
                logger.exception("a message from %s is dropped", sender)
