"""What a read of an object from another node has, and needs: a destination, and an outcome."""

import enum
from typing import Protocol


class Outcome(enum.Enum):
    """Result of reading an object."""

    DONE = 0
    ABSENT = 1
    DAMAGED = 2
    NOT_TAKEN = 3  # refused by its destination
    UNREACHED = 4  # the holder cannot be reached
    BUSY = 5  # too much is pinned there
    SPOILED = 6  # it, or an object read with it, was damaged on its way
    BY_ADDRESS = 7  # the holder's engine leaves it to its node


Places = list[tuple[int, int]]  # pieces of local memory, to be filled in order: address, bytes


class Destination(Protocol):
    """Takes one object. ``open`` may be called again after ``abort``, for another copy of it.

    Attributes:
        wanted: offset of the wanted part in the object, or ``WHOLE``, and its maximum size.
        was_compared: whether the holder has compared the object with its checksum, and need not do
            so again for a part of it.
        location: its memory, as in ``Buffer``.
        places: where a whole object of any size goes that is accepted, if that is known before it
            is opened: then ``arrive`` may be called instead of ``open`` and ``commit``.
    """

    wanted: tuple[int, int]
    was_compared: bool
    location: str
    places: Places | None

    def arrive(self, num_bytes: int) -> None:
        """Accept an object of this size, which is in ``places``."""
        self.open(num_bytes)
        self.commit()

    def open(self, num_bytes: int) -> Places | None:
        """Return where the bytes wanted of an object of this size go; None: it is refused."""

    def commit(self) -> None:
        """Accept the bytes: they are there, and right."""

    def abort(self) -> None:
        """Discard the bytes: they are not there, or may be wrong."""
