"""What is mapped into this process, by address."""

import bisect


class MappedMemory:
    """A snapshot of what is mapped into this process, from ``/proc/self/maps``.

    ``access(address, num_bytes)`` is the access that the process has to all of a range: ``"rw"``,
    ``"r"`` or none. GPU memory is not included: its addresses are only reserved here.
    """

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._permissions: list[str] = []
        with open("/proc/self/maps") as lines:
            for line in lines:
                addresses, permissions = line.split(maxsplit=2)[:2]
                begin, _, end = addresses.partition("-")
                self._begins.append(int(begin, 16))
                self._ends.append(int(end, 16))
                self._permissions.append(permissions)

    def access(self, address: int, num_bytes: int) -> str:
        """The access that this process has to every byte of the range."""
        allowed = "rw"
        end = address + num_bytes
        index = bisect.bisect_right(self._begins, address) - 1
        while address < end:
            if not 0 <= index < len(self._begins):
                return ""
            if not self._begins[index] <= address < self._ends[index]:
                return ""
            allowed = "".join(letter for letter in allowed if letter in self._permissions[index])
            address = self._ends[index]
            index += 1
        return allowed if allowed.startswith("r") else ""
