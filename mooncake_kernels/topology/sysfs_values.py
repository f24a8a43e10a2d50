"""Values in sysfs files: a missing one is a default, a present one must be valid."""

from .._machine_root import MachineRoot
from .model import Malformed

_MAX = 1 << 32


def integer(root: MachineRoot, name: str, default: int) -> int:
    """Return the number in a file, decimal or with 0x; the default if there is none."""
    text = root.text(name)
    if not text:
        return default
    try:
        value = int(text, 0)
    except ValueError:
        value = _MAX
    if not -_MAX < value < _MAX:
        raise Malformed(f"{name} must hold an integer, got {text[:80]!r}")
    return value


def leading_number(root: MachineRoot, name: str, unit: str) -> float:
    """Return 32.0 for ``32.0 GT/s PCIe``; 0 if the file is missing, or says it is unknown."""
    text = root.text(name)
    if not text or text.lower().startswith("unknown"):
        return 0.0
    try:
        return number_with_unit(text, unit)
    except ValueError:
        raise Malformed(f"{name} must hold a number of {unit}, got {text[:80]!r}") from None


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
