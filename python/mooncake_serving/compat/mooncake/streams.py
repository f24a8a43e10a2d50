"""Transfers that CUDA streams carry out, from their submission to their end."""

import itertools
import threading

import mooncake_kernels as mk
from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer.stream_transfers import StreamTransfers

from .codes import log
from .peers import Columns, Lane, Peers, deadline_of

_WATCH_S = 1.0


class Streams:
    """Those of one engine. Thread-safe."""

    def __init__(self, engine: mk.TransferEngine, timeout_s: float):
        self._transfers = StreamTransfers(engine)
        # Connections of their own: over another one a transfer might be behind one for which a GPU
        # copies. One is enough, as they are submitted only when their streams have arrived.
        self._peers = Peers(engine, max_lanes=1)
        self._timeout_s = timeout_s
        self._keys = itertools.count()
        self._lock = threading.Lock()
        self._enqueued: dict[int, tuple[str, Lane]] = {}  # with the call that has enqueued it
        self._is_watched = False

    def enqueue(self, call: str, name: str, columns: Columns, *, reads: bool, stream: int) -> None:
        """Open the peer, if need be, and enqueue the request; see ``StreamTransfers``."""
        self.check()
        sizes = columns[2]
        if not len(sizes):
            return
        lane = self._peers.take(name, self._timeout_s)
        key = next(self._keys)
        with self._lock:
            self._enqueued[key] = call, lane
        try:
            self._watch()
            deadline_s = deadline_of(sizes, self._timeout_s)
            self._transfers.enqueue(
                stream, lane.peer, *columns, reads=reads, deadline_s=deadline_s, key=key
            )
        except BaseException as error:
            with self._lock:
                del self._enqueued[key]
            # It may have been restarted if it does not answer; all else is not the peer's fault.
            self._peers.give_back(lane, failed=isinstance(error, TransferError))
            raise

    def check(self) -> None:
        """Raise the first failure that was not reported yet."""
        self._transfers.check()

    def _watch(self) -> None:
        with self._lock:
            if not self._is_watched:
                threading.Thread(target=self._watching, name="mk-streams", daemon=True).start()
                self._is_watched = True

    def _watching(self) -> None:
        """Log failures, and give back lanes, as long as there is something enqueued."""
        while True:
            for key, failure in self._transfers.take(_WATCH_S):
                with self._lock:  # unknown: a signal's handler raised when it was enqueued
                    call, lane = self._enqueued.get(key, ("enqueue", None))
                if failure:
                    log.error("%s: %.1000s", call, failure)
                if lane is not None:
                    self._peers.give_back(lane, failed=bool(failure))
                with self._lock:
                    self._enqueued.pop(key, None)
            with self._lock:
                if not self._enqueued:
                    self._is_watched = False
                    return
