"""The threads that receive other nodes' requests and answers."""

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine

from ...rpc import Receiver, Refused
from .answers import Handler
from .calls import NodeRpc
from .messages import Message, Pinned, Pull, Release, Request, Response, decode, reason_of

logger = logging.getLogger(__name__)

NUM_THREADS = 4
MAX_PENDING = 1024  # requests; further ones are not answered
POLL_S = 0.1  # how long closing may go unnoticed


class NodeServer:
    """Takes the notifications of an engine, all of which are the node's.

    One thread receives, and hands answers to their waiters. Other threads carry out requests, with
    one thread for pulls alone: pulls wait for other nodes, which may wait for a pin here.

    Args:
        engine: whose notifications are taken.
        rpc: this node's requests; also sends its answers.
        handler: of the requests of others.
        answer_s: how long it may take to deliver an answer.
        heard: is called with the name of each sender.
        meet: is called with the name and the life of each that asks for something.
        look: is called several times a second.
    """

    def __init__(
        self,
        engine: TransferEngine,
        rpc: NodeRpc,
        handler: Handler,
        answer_s: float,
        *,
        heard: Callable[[str], object],
        meet: Callable[[str, int], object],
        look: Callable[[], object],
    ):
        self._rpc = rpc
        self._handler = handler
        self._answer_s = answer_s
        self._heard = heard
        self._meet = meet
        self._ends_s = math.inf  # when closing is to be over, of ``time.monotonic``
        self._room = threading.BoundedSemaphore(MAX_PENDING)
        self._serving = ThreadPoolExecutor(NUM_THREADS, "mk-store-serve")
        self._pulling = ThreadPoolExecutor(1, "mk-store-pull")
        self._receiver = Receiver(engine, self._take, look, lambda: POLL_S, "mk-store-receive")

    def close(self) -> None:
        """Stop; requests being carried out finish first, and waiting and later ones are refused."""
        self._ends_s = time.monotonic() + self._answer_s
        self._receiver.close()
        for executor in (self._pulling, self._serving):
            executor.shutdown()

    def _take(self, sender: str, data: bytes) -> None:
        self._heard(sender)
        message = decode(data)
        if isinstance(message, Request):
            self._meet(sender, message.life)
        if isinstance(message, Release) and not message.is_answered:
            self._handler.handle(sender, message)
        elif isinstance(message, Pull):
            self._submit(self._pulling, self._serve, sender, message, time.monotonic())
        elif isinstance(message, Request):
            self._submit(self._serving, self._serve, sender, message, time.monotonic())
        elif not self._rpc.take_response(sender, message) and isinstance(message, Pinned):
            # Too late: the objects that were pinned are not read.
            release = self._rpc.make(
                Release, self._answer_s, token=message.number, is_answered=False
            )
            self._submit(self._serving, self._send, sender, release)

    def _submit(self, executor: Executor, work: Callable[..., object], *args: object) -> None:
        if not self._room.acquire(blocking=False):
            logger.warning("a request of %s is not answered: too many wait", args[0])
            return
        try:
            submitted = executor.submit(work, *args)
        except RuntimeError:  # the interpreter exits: the node leaves before it ends
            self._room.release()
            return
        submitted.add_done_callback(lambda _: self._room.release())

    def _serve(self, sender: str, request: Request, received: float) -> None:
        now = time.monotonic()
        if now > received + request.deadline_ms / 1000 or now > self._ends_s:
            return  # the sender has given it up, or it takes too long to refuse them all
        try:
            answer: Response | None = Refused(request.number, "the node is closed")
            if self._ends_s == math.inf:
                answer = self._handler.handle(sender, request)
            if answer is not None:
                self._send(sender, answer)
        except (RuntimeError, ValueError, OSError) as error:  # ours, the pool's, the system's
            self._send(sender, Refused(request.number, reason_of(error)))

    def _send(self, name: str, message: Message) -> None:
        try:
            self._rpc.send(name, message, self._answer_s)
        except TransferError as error:
            logger.info("%s is not told: %s", name, error)
