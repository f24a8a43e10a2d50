"""The thread by which a node stays a member, and notices who else is none any more."""

import logging
import threading
from collections.abc import Callable

from mooncake_kernels.errors import Unavailable

from ..directory import Directory, Member
from .listing import Listing

logger = logging.getLogger(__name__)

BEATS_A_LOOK = 3  # at all objects of the pool
BEATS_A_COMPARISON = 30  # of all objects with all that the directory has of them
BEATS_A_SWEEP = 10


class Membership:
    """A member of a directory, for as long as this is open.

    Args:
        directory: to be joined.
        listing: of its pool, published anew whenever the directory has forgotten it.
        describe: what the directory is told of the node, each time.
        ttl_s: after how many seconds without a word it is taken for dead.
        on_members: is called with the living members, by name, several times in ``ttl_s``.

    Raises:
        Unavailable: the directory does not answer.
    """

    def __init__(
        self,
        directory: Directory,
        listing: Listing,
        describe: Callable[[], Member],
        ttl_s: float,
        on_members: Callable[[dict[str, Member]], object],
    ):
        self._directory = directory
        self._listing = listing
        self._describe = describe
        self._ttl_s = ttl_s
        self._on_members = on_members
        self._name = describe().name
        self._is_over = threading.Event()
        self._members: dict[str, Member] = {}
        self._join()
        self.refresh()
        self._thread = threading.Thread(target=self._run, name="mk-store-member", daemon=True)
        self._thread.start()

    def members(self) -> dict[str, Member]:
        """Who lived when last asked."""
        return self._members

    def refresh(self) -> dict[str, Member]:
        """Ask who lives.

        Raises:
            Unavailable: the directory does not answer.
        """
        self._members = {member.name: member for member in self._directory.members()}
        return self._members

    def announce(self) -> None:
        """Tell the directory now what has changed.

        Raises:
            Unavailable: the directory does not answer; it is told later.
        """
        if not self._directory.renew(self._describe(), self._ttl_s):
            self._join()
        self.refresh()

    def close(self) -> None:
        """Leave. A directory that does not answer forgets the member by itself."""
        self._is_over.set()
        self._thread.join()
        try:
            self._directory.leave(self._name)
        except Unavailable as error:
            logger.warning("%s did not leave: %s", self._name, error)

    def _run(self) -> None:
        num_beats, is_away = 0, False
        while not self._is_over.wait(self._ttl_s / 3):
            num_beats += 1
            try:
                self._beat(num_beats)
                is_away = False
            except (RuntimeError, OSError, ValueError) as error:  # also of a pool or an engine
                if not is_away:
                    logger.warning("%s cannot renew its membership: %s", self._name, error)
                is_away = True

    def _beat(self, number: int) -> None:
        if not self._directory.renew(self._describe(), self._ttl_s):
            self._join()
        elif self._listing.is_stale or number % BEATS_A_COMPARISON == 0:
            self._listing.publish_all()
        elif number % BEATS_A_LOOK == 0:
            self._listing.tell_changes()
        self._on_members(self.refresh())
        if number % BEATS_A_SWEEP == 0:
            self._directory.sweep()

    def _join(self) -> None:
        self._directory.join(self._describe(), self._ttl_s)
        self._listing.publish_all()
