"""Checks of the PCIe links of GPUs and NICs."""

import re
from collections.abc import Iterator, Mapping

from ..._machine_root import MachineRoot
from .. import pci
from ..finding import Finding, Topic

TOPIC = Topic(
    "pcie",
    {
        "link": "a link that came up slower or narrower bounds every transfer of the device",
        "relaxed_ordering": "without it many processors hold a fast NIC's writes to half its rate",
    },
)
_DEVICE_CONTROL = 8  # in the PCI Express capability
_RELAXED_ORDERING = 0x10


def check(root: MachineRoot, gpus: Mapping[str, str], nics: Mapping[str, str]) -> Iterator[Finding]:
    """Check each link. Devices are given by address, with their display names."""
    for address, subject in gpus.items():
        yield _link(root, address, subject, is_gpu=True)
    for address, subject in nics.items():
        yield _link(root, address, subject, is_gpu=False)
        yield _relaxed_ordering(root, address, subject)


def _ability(root: MachineRoot, address: str, kind: str) -> tuple[float, int] | None:
    """Return (GT/s, lanes), "current" or "max"; None if the kernel does not know."""
    folder = f"{pci.DEVICES}/{address}"
    speed = re.match(
        r"([0-9]{1,3}(\.[0-9]{1,2})?) GT/s", root.text(f"{folder}/{kind}_link_speed") or ""
    )
    width = root.integer(f"{folder}/{kind}_link_width")
    if not speed or width is None or not 0 < width <= 32:
        return None
    return float(speed.group(1)), width


def _link(root: MachineRoot, address: str, subject: str, *, is_gpu: bool) -> Finding:
    now, best = _ability(root, address, "current"), _ability(root, address, "max")
    if now is None or best is None:
        return TOPIC.unknown("link", subject, "the kernel does not tell its speed and width")
    seen = f"{now[0]:g} GT/s x{now[1]}"
    if now[0] >= best[0] and now[1] >= best[1]:
        return TOPIC.ok("link", subject, seen)
    above = pci.path_of(root, f"{pci.DEVICES}/{address}")[:-1]
    slot = _ability(root, above[-1], "max") if above else None
    reach = (min(best[0], slot[0]), min(best[1], slot[1])) if slot else best
    if now[1] < reach[1] or (now[0] < reach[0] and not is_gpu):
        detail = f"{seen}, must be {reach[0]:g} GT/s x{reach[1]}"
        fix = f"reseat the card, or: setpci -s {above[-1]} CAP_EXP+10.w=20:20" if above else None
        return TOPIC.warning("link", subject, detail, fix)
    if now[0] < reach[0]:  # to save power, until there is work
        detail = f"{seen} of {reach[0]:g} GT/s: a GPU that is idle slows down"
        return TOPIC.info(
            "link", subject, detail, f"under load: nvidia-smi -q -d PCIE -i {address}"
        )
    detail = f"{seen}: all that its slot has, the card can {best[0]:g} GT/s x{best[1]}"
    return TOPIC.warning("link", subject, detail, "move the card to a faster slot")


def _relaxed_ordering(root: MachineRoot, address: str, subject: str) -> Finding:
    space = pci.config(root, address)
    offset = pci.capability(space, pci.EXPRESS)
    if offset is None or offset + _DEVICE_CONTROL + 2 > len(space):
        detail = "its configuration space is not readable: run as root"
        return TOPIC.unknown("relaxed_ordering", subject, detail)
    if pci.word(space, offset + _DEVICE_CONTROL) & _RELAXED_ORDERING:
        return TOPIC.ok("relaxed_ordering", subject, "on")
    fix = f"setpci -s {address} CAP_EXP+8.w=10:10"
    return TOPIC.info("relaxed_ordering", subject, "off in Device Control", fix)
