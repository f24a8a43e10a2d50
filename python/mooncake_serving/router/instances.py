"""The engines that a router has now, by number."""

from collections import deque
from collections.abc import Iterator, Sequence

from .config import InstanceConfig


class Instances:
    """Engines, each of which has a number until it is removed.

    Args:
        first: those of the file, numbered from 0.
        num_places: how many there may be at once.
    """

    def __init__(self, first: Sequence[InstanceConfig], num_places: int):
        self.num_places = num_places
        self._by_number = dict(enumerate(first))
        # The number that was given back last is used last: what still names it means the old one.
        self._free = deque(range(len(first), num_places))

    def __getitem__(self, number: int) -> InstanceConfig:
        return self._by_number[number]

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[int]:
        """The numbers."""
        return iter([*self._by_number])

    def items(self) -> list[tuple[int, InstanceConfig]]:
        """List numbers and engines."""
        return [*self._by_number.items()]

    def number_of(self, name: str) -> int | None:
        """Return the number of the engine of a name; None: there is none."""
        return next((number for number, one in self.items() if one.name == name), None)

    def add(self, instance: InstanceConfig) -> int | None:
        """Add an engine, and return its number; None: there is no place for another one."""
        if not self._free:
            return None
        number = self._free.popleft()
        self._by_number[number] = instance
        return number

    def replace(self, number: int, instance: InstanceConfig) -> None:
        """Describe an engine anew."""
        self._by_number[number] = instance

    def remove(self, number: int) -> None:
        """Remove an engine; its number may mean another one from now on."""
        del self._by_number[number]
        self._free.append(number)
