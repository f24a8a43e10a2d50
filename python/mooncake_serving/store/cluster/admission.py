"""Whether a node's pool accepts new objects, and whether any are being put into it."""

from .guards import Guard, Guards


class Admission:
    """A gate to a pool, for this node's callers and for requests of others. Thread-safe::

        with admission.enter():
            if admission.is_open:
                ...  # put objects

    To drain the pool, close the gate and wait until those inside are done: then the only new
    objects are those of processes without a node.

    Attributes:
        is_open: whether those who have entered may put objects.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._inside = Guards()

    def set_open(self, is_open: bool) -> None:
        """Open or close it; those inside stay."""
        self.is_open = is_open

    @property
    def is_used(self) -> bool:
        """Whether anyone is inside."""
        return self._inside.any()

    def enter(self) -> Guard:
        """Enter for the duration of a ``with`` block, then look whether it is open."""
        return self._inside.new()
