"""The thread that takes what other processes send."""

import logging
import threading
from collections.abc import Callable

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.transfer import TransferEngine

logger = logging.getLogger(__name__)


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
