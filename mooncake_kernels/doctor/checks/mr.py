"""Checks of how much memory a device can register, according to libibverbs."""

from collections.abc import Iterator, Sequence

from ..._machine_root import MachineRoot
from ...rdma import DeviceInfo
from .. import ports, process
from ..finding import Finding, Topic
from ..process import human

TOPIC = Topic(
    "regions",
    {
        "max_mr_size": "a larger region is refused with EINVAL or ENOMEM: it has to be split",
        "max_mr": "more regions are refused with ENOMEM",
    },
)
_MIN_REGIONS = 4096


def check(root: MachineRoot, devices: Sequence[DeviceInfo]) -> Iterator[Finding]:
    """Check each device that libibverbs lists; sysfs does not have this."""
    memory = process.memory_bytes(root)
    unusable = ports.left_out(root)
    for device in devices:
        if device.name in unusable:
            continue
        size = f"{human(device.max_mr_bytes)} a region"
        if memory is not None and device.max_mr_bytes < memory:
            detail = f"{size}, of {human(memory)} of memory: larger buffers must be split"
            yield TOPIC.info("max_mr_size", device.name, detail)
        else:
            yield TOPIC.ok("max_mr_size", device.name, size)
        if device.max_mr < _MIN_REGIONS:
            detail = f"{device.max_mr} regions, should be {_MIN_REGIONS} or more"
            yield TOPIC.warning("max_mr", device.name, detail, "register fewer, larger regions")
        else:
            yield TOPIC.ok("max_mr", device.name, f"{device.max_mr} regions")
