"""Which objects of a pool are copies that were not published yet."""

import numpy as np


class CopyMarks:
    """Ids of objects that come, or came, from other pools. Thread-safe.

    A look at the pool takes unknown objects for new puts. Copies are not: so they are marked before
    they become visible, and until the directory has decided.
    """

    def __init__(self) -> None:
        self._coming: set[int] = set()
        self._here: set[int] = set()

    def begin(self, object_id: int) -> None:
        self._coming.add(object_id)

    def commit(self, object_id: int) -> None:
        self._here.add(object_id)
        self._coming.discard(object_id)

    def end(self, ids: np.ndarray) -> None:
        """Remove marks: the directory has decided, or nothing came."""
        if self._coming or self._here:
            self._coming.difference_update(ids.tolist())
            self._here.difference_update(ids.tolist())

    def are_in(self, ids: np.ndarray) -> np.ndarray:
        """``[n]`` bool: which of ``[n]`` ids are marked."""
        marked = (*tuple(self._coming), *tuple(self._here))  # in this order: none is missed
        return np.isin(ids, np.array(marked, np.uint64)) if marked else np.zeros(len(ids), bool)

    def here(self) -> np.ndarray:
        """Those that have arrived."""
        ids = tuple(self._here)
        return np.array(ids, np.uint64)

    def forget_gone(self, here: np.ndarray, present: np.ndarray) -> None:
        """Forget those that had arrived, and are no longer in the pool."""
        if len(here):
            self.end(here[~np.isin(here, present)])
