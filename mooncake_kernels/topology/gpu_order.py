"""GPUs in the numbering of a process that sees only some of them, or in another order."""

import dataclasses
import os
from collections.abc import Iterable, Sequence

from ..errors import InvalidArgument, shown
from .json_format import Unreachable
from .model import Gpu, System, bus_order


def reordered(
    system: System, unreachable: Unreachable, order: Sequence[int | str | Gpu]
) -> tuple[System, Unreachable]:
    """Return the machine with GPUs in the given order, then those left out by PCI address.

    Raises:
        InvalidArgument: a GPU does not exist, or is named twice.
    """
    if isinstance(order, str | bytes) or not isinstance(order, Iterable):
        raise InvalidArgument(f"with_gpu_order: order must be a list of GPUs, got {shown(order)}")
    keys = {
        str(key): gpu for gpu in system.gpus for key in (gpu.index, gpu.pci, gpu.uuid) if key != ""
    }
    first = []
    for name in order:
        gpu = keys.get(name.pci if isinstance(name, Gpu) else str(name))
        if gpu is None or gpu in first:
            known = ", ".join(gpu.uuid or gpu.pci for gpu in system.gpus) or "none"
            raise InvalidArgument(
                f"with_gpu_order: order must name each of these once: {known}; got {name!r}"
            )
        first.append(gpu)
    rest = sorted(
        (gpu for gpu in system.gpus if gpu not in first), key=lambda gpu: bus_order(gpu.pci)
    )
    gpus = tuple(dataclasses.replace(gpu, index=i) for i, gpu in enumerate([*first, *rest]))
    moved = {str(old): str(new) for old, new in zip([*first, *rest], gpus, strict=True)}
    known_bad = {(moved.get(place, place), nic): why for (place, nic), why in unreachable.items()}
    return dataclasses.replace(system, gpus=gpus), known_bad


def visible_gpus(gpus: Sequence[Gpu]) -> list[Gpu]:
    """Return those that CUDA_VISIBLE_DEVICES names, in its order.

    Like CUDA, it accepts indices and prefixes of UUIDs, up to the first that names no GPU, or one
    that was named before. Indices are those of CUDA_DEVICE_ORDER=PCI_BUS_ID. It does not ask CUDA
    itself, after which the process could not fork.
    """
    seen: list[Gpu] = []
    for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","):
        named = [gpu for gpu in gpus if _is_named(gpu, name.strip())]
        if len(named) != 1 or named[0] in seen:
            break
        seen += named
    return seen


def _is_named(gpu: Gpu, name: str) -> bool:
    return name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))
