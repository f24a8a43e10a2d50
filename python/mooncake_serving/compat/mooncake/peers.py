"""Peers by name: opened on first use, several connections to each, kept until one fails."""

import concurrent.futures
import threading

from mooncake_kernels.errors import FailureKind, TransferError
from mooncake_kernels.transfer import Peer, TransferEngine

MAX_LANES = 8  # to one name; a call that finds all of them busy queues behind another


class Lane:
    """One connection to a peer. Its users are counted under the lock of ``Peers``."""

    def __init__(self, name: str):
        self.name = name
        self.num_users = 0
        self.retired = False
        self._opened: concurrent.futures.Future[Peer] = concurrent.futures.Future()

    @property
    def peer(self) -> Peer:
        return self._opened.result(timeout=0)

    def open(self, engine: TransferEngine, deadline_s: float) -> None:
        try:
            self._opened.set_result(engine.open(self.name, allow_file=False, deadline_s=deadline_s))
        except BaseException as error:  # for those that wait, whatever it is
            kind = error.kind if isinstance(error, TransferError) else FailureKind.OTHER
            failed = TransferError(self.name, f"it was not opened: {error}", kind=kind)
            self._opened.set_exception(failed)
            raise

    def wait_until_open(self, deadline_s: float) -> None:
        try:
            self._opened.result(deadline_s)
        except concurrent.futures.TimeoutError:
            cause = f"deadline of {deadline_s:g} s passed"
            raise TransferError(self.name, cause, kind=FailureKind.TIMED_OUT) from None

    def close(self) -> None:
        if self._opened.exception(timeout=0) is None:
            self.peer.close()


class Peers:
    """The lanes of one engine, by the name of the peer. Thread-safe."""

    def __init__(self, engine: TransferEngine, max_lanes: int = MAX_LANES):
        self._engine = engine
        self._max_lanes = max_lanes  # to one name
        self._lock = threading.Lock()
        self._lanes: dict[str, list[Lane]] = {}

    def take(self, name: str, deadline_s: float) -> Lane:
        """Return an idle lane, else a new one, else the one with the fewest users.

        The caller must give it back. Only the users of a lane wait for it to open.

        Raises:
            InvalidArgument, Unavailable, TransferError: as ``TransferEngine.open``.
        """
        with self._lock:
            lanes = self._lanes.setdefault(name, [])
            lane = min(lanes, key=lambda lane: lane.num_users, default=None)
            is_new = lane is None or (lane.num_users > 0 and len(lanes) < self._max_lanes)
            if lane is None or is_new:
                lane = Lane(name)
                lanes.append(lane)
            lane.num_users += 1
        try:
            if is_new:
                lane.open(self._engine, deadline_s)
            else:
                lane.wait_until_open(deadline_s)
        except BaseException:
            self.give_back(lane, failed=True)
            raise
        return lane

    def give_back(self, lane: Lane, *, failed: bool) -> None:
        """End one use of a lane.

        After a failure none of the peer's lanes is used again: the peer may have been restarted,
        and then each of them would fail once. The last user of each closes it.
        """
        with self._lock:
            lane.num_users -= 1
            left = [lane]
            if failed and not lane.retired:
                left = self._lanes.pop(lane.name)
                for one in left:
                    one.retired = True
            closing = [one for one in left if one.retired and one.num_users == 0]
        for one in closing:
            one.close()
