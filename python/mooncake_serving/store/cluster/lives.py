"""Which process has a node's name: the same as before, or one that was started since."""

import threading
from collections.abc import Container


class Lives:
    """The last known life of each name, see ``Request``. Thread-safe."""

    def __init__(self) -> None:
        self._lives: dict[str, int] = {}
        self._lock = threading.Lock()

    def meet(self, name: str, life: int) -> bool:
        """Record the life that a name has now; returns whether it was known with another one."""
        with self._lock:
            known = self._lives.get(name)
            self._lives[name] = life
        return known not in (None, life)

    def keep(self, names: Container[str]) -> None:
        """Forget all other names."""
        with self._lock:
            self._lives = {name: life for name, life in self._lives.items() if name in names}
