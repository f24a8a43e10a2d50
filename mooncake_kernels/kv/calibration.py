"""The table that `python -m mooncake_kernels calibrate` measures and that "auto" reads."""

import json
import logging
import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import _library, config

FORMAT = 1
DIRECTIONS = ("h2h", "d2d", "h2d", "d2h")
logger = logging.getLogger("mooncake_kernels")


@dataclass(frozen=True)
class Cell:
    """The measurement for one size and number of runs: GB/s copied, by engine."""

    direction: str
    run_bytes: int
    num_runs: int
    gb_per_s: dict[str, float]


@dataclass(frozen=True)
class Calibration:
    """A calibration table.

    Attributes:
        machine: where it was measured: "cpu", "cores", "gpu" (None without one) and others.
        cells: the measurements.
        stream_from_bytes: the size from which the CPU stores past its cache; None if no size was
            found.
    """

    machine: dict[str, Any]
    cells: tuple[Cell, ...]
    stream_from_bytes: int | None

    def best(
        self, direction: str, run_bytes: int, num_runs: int, engines: tuple[str, ...]
    ) -> str | None:
        """Return the fastest of the engines in the nearest cell that has any of them."""
        known = [
            cell
            for cell in self.cells
            if cell.direction == direction and not cell.gb_per_s.keys().isdisjoint(engines)
        ]
        if not known or run_bytes < 1 or num_runs < 1:
            return None

        def distance(cell: Cell) -> float:
            return math.hypot(
                math.log2(cell.run_bytes / run_bytes), math.log2(cell.num_runs / num_runs)
            )

        nearest = min(known, key=distance).gb_per_s
        return max((engine for engine in engines if engine in nearest), key=nearest.__getitem__)


def parse(text: str) -> Calibration:
    """Read a table.

    Raises:
        ValueError: it is not a table; the message says why.
    """
    try:
        table = json.loads(text)
        if table["format"] != FORMAT:
            raise ValueError(f"format must be {FORMAT}, got {table['format']!r}")
        cells = tuple(_cell(cell) for cell in table["cells"])
        stream_from = table["host"]["stream_from_bytes"]
        if stream_from is not None and not (type(stream_from) is int and stream_from > 0):
            raise ValueError(f"stream_from_bytes must be an integer > 0, got {stream_from!r}")
        machine = table["machine"]
        if not {"cpu", "cores", "gpu"} <= machine.keys():
            raise ValueError("machine must have cpu, cores and gpu")
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no calibration table: {type(error).__name__} {error}") from None
    return Calibration(machine, cells, stream_from)


def _cell(cell: dict[str, Any]) -> Cell:
    made = Cell(cell["direction"], cell["run_bytes"], cell["num_runs"], dict(cell["gb_per_s"]))
    sizes = (made.run_bytes, made.num_runs)
    speeds = made.gb_per_s.values()
    if (
        made.direction not in DIRECTIONS
        or not all(type(size) is int and size > 0 for size in sizes)
        or not all(type(speed) in (int, float) and 0 < speed < math.inf for speed in speeds)
    ):
        raise ValueError(f"a cell must have a direction, sizes and speeds > 0, got {cell!r}")
    return made


def cpu_name() -> str:
    """Return the processor's name, as Linux reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


_UNREAD: Any = object()
_current: Calibration | None = _UNREAD
_gpus: dict[int, bool] = {}  # by index: whether the table is for that GPU
defaults: dict[str, str] = {}  # what default_engine() returned, since the table was read


def current() -> Calibration | None:
    """Return the current table, read once, when "auto" first chooses; None if there is none.

    This also applies its settings for the CPU. A table that is malformed, or for another processor,
    is ignored with a warning.

    Raises:
        ValueError: MOONCAKE_KERNELS_CALIBRATION names a path without a table.
    """
    global _current
    if _current is _UNREAD:
        _current = _load(config.current().calibration)
        if _current is not None and _current.stream_from_bytes is not None:
            _library.set_stream_from_bytes(_current.stream_from_bytes)
    return _current


def default_engine(device_type: str) -> str:
    """Return what "auto" is where no cell says more; also applies the settings for the CPU."""
    current()
    chosen = defaults[device_type] = _library.choose_engine(device_type)
    return chosen


def forget() -> None:
    """Drop the table and its CPU settings; it is read again when next needed."""
    global _current
    _current = _UNREAD
    _gpus.clear()
    defaults.clear()
    _library.set_stream_from_bytes(0)


def is_of_gpu(table: Calibration, index: int) -> bool:
    """Tell whether a table is for that GPU, which must be in use; warn once if not."""
    if index in _gpus:
        return _gpus[index]
    name = torch.cuda.get_device_name(index)
    _gpus[index] = table.machine["gpu"] == name
    if _gpus[index]:
        return True
    logger.warning("calibration: ignored for cuda:%d, a %s, for it is of %s; `python -m "
                   "mooncake_kernels calibrate` makes one", index, name,
                   table.machine["gpu"] or "no GPU")  # fmt: skip
    return False


def _load(path: str) -> Calibration | None:
    if not path:
        return None
    is_given = path != config.Settings.calibration
    file = Path(path).expanduser()
    try:
        table = parse(file.read_text())
    except FileNotFoundError:
        if not is_given:
            return None
        raise ValueError(
            f"MOONCAKE_KERNELS_CALIBRATION must be a table's path, got {path!r}: no such file"
        ) from None
    except (OSError, ValueError) as error:
        if is_given:
            raise ValueError(
                f"MOONCAKE_KERNELS_CALIBRATION must be a table's path, got {path!r}: {error}"
            ) from None
        logger.warning("calibration: %s is ignored: %s", file, error)
        return None
    here = {"cpu": cpu_name(), "cores": os.cpu_count()}
    there = {key: table.machine[key] for key in here}
    if here != there:
        logger.warning("calibration: %s is ignored: it is of %s, this is %s", file, there, here)
        return None
    return table
