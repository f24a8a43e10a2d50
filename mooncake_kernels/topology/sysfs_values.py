"""Values in sysfs files. A missing one is unknown; so is an invalid one, which is logged.

One device that reports nonsense must not hide the others.
"""

import logging

from .._machine_root import MachineRoot

MAX_WIDTH = 32  # of a PCI link; devices that do not know theirs report more
_MAX = 1 << 32

_log = logging.getLogger("mooncake_kernels.topology")


def warn(name: str, must: str, text: str) -> None:
    """Log that a file's value counts as unknown, because it is not what it must be."""
    _log.warning("%s %s, got %r: taken as unknown", name, must, text[:80])


def warn_of_vanished(name: str) -> None:
    """Log that an entry leads nowhere, and is left out."""
    _log.warning("%s leads nowhere: left out", name)


def integer(root: MachineRoot, name: str, default: int) -> int:
    """Return the number in a file, decimal or with 0x; the default if that is unknown."""
    text = root.text(name)
    if not text:
        return default
    try:
        value = int(text, 0)
    except ValueError:
        value = _MAX
    if -_MAX < value < _MAX:
        return value
    warn(name, "must hold an integer", text)
    return default


def leading_number(root: MachineRoot, name: str, unit: str) -> float:
    """Return 32.0 for ``32.0 GT/s PCIe``; 0 if it is unknown."""
    text = root.text(name)
    if not text or text.lower().startswith("unknown"):
        return 0.0
    try:
        return number_with_unit(text, unit)
    except ValueError:
        warn(name, f"must hold a number of {unit}", text)
        return 0.0


def number_with_unit(text: str, unit: str) -> float:
    """Return 32.0 for ``32.0 GT/s PCIe``.

    Raises:
        ValueError: it is not such a number.
    """
    number, _, rest = text.partition(" ")
    value = float(number)
    if not rest.startswith(unit) or not 0 <= value < 1e6:
        raise ValueError(text)
    return value


def cpu_set(text: str) -> set[int]:
    """Return the processors of a list like ``0-55,112-167``.

    Raises:
        ValueError: it is not such a list.
    """
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if not 0 <= low <= high < 1 << 20:
            raise ValueError(part)
        cpus |= set(range(low, high + 1))
    return cpus
