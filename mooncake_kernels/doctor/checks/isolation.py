"""Checks of what makes peer-to-peer PCI traffic take a detour: ACS and the IOMMU."""

from collections.abc import Iterator, Mapping

from ..._machine_root import MachineRoot
from .. import pci
from ..finding import Finding, Topic

TOPIC = Topic(
    "isolation",
    {
        "acs": "ACS sends what a NIC writes to a GPU up to the processor: slow, and it may hang",
        "iommu": "an IOMMU that translates makes each access between devices slow, or fail",
    },
)
# Request Redirect, Completion Redirect, Egress Control
_REDIRECTS = {0x04: "ReqRedir", 0x08: "CmpltRedir", 0x20: "EgressCtrl"}
_CONTROL = 6
_AS_ROOT = "sudo python -m mooncake_kernels doctor --only isolation"


def check(root: MachineRoot, gpus: Mapping[str, str], nics: Mapping[str, str]) -> Iterator[Finding]:
    """Check the bridges above GPUs and NICs, and the IOMMU's treatment of them."""
    devices = {**gpus, **nics}
    if not gpus or len(devices) < 2:
        detail = "not looked at: it takes two devices, one of them a GPU"
        yield TOPIC.info("acs", "PCI bridges", detail)
        return
    yield from _acs(root, devices)
    for address, subject in devices.items():
        yield _iommu(root, address, subject)


def _acs(root: MachineRoot, devices: Mapping[str, str]) -> Iterator[Finding]:
    above: dict[str, list[str]] = {}
    for address, subject in devices.items():
        for bridge in pci.path_of(root, f"{pci.DEVICES}/{address}")[:-1]:
            above.setdefault(bridge, []).append(subject)
    unread = []
    num_clear = 0
    for bridge, below in above.items():
        space = pci.config(root, bridge)
        if len(space) <= 0x100:
            unread.append(bridge)
            continue
        offset = pci.extended_capability(space, pci.ACS)
        control = pci.word(space, offset + _CONTROL) if offset is not None else 0
        bits = [name for bit, name in _REDIRECTS.items() if control & bit]
        if not bits:
            num_clear += 1
            continue
        detail = f"{' '.join(bits)} on (ACS control {control:#06x}), above {', '.join(below)}"
        fix = f"setpci -s {bridge} ECAP_ACS+6.w=0000 (until reboot; for good: ACS off in the BIOS)"
        yield TOPIC.warning("acs", bridge, detail, fix)
    if unread:
        detail = f"the configuration space of {len(unread)} bridges is not readable: run as root"
        yield TOPIC.unknown("acs", unread[0], detail, _AS_ROOT)
    if num_clear:
        yield TOPIC.ok("acs", f"{num_clear} PCI bridges", "none redirects")


def _iommu(root: MachineRoot, address: str, subject: str) -> Finding:
    group = root.resolve(f"{pci.DEVICES}/{address}/iommu_group")
    if group is None:
        return TOPIC.ok("iommu", subject, "no IOMMU in its way")
    words = (root.text("/proc/cmdline") or "").split()
    kind = root.text(f"{group}/type")
    if kind == "identity" or (kind is None and {"iommu=pt", "iommu.passthrough=1"} & {*words}):
        return TOPIC.ok("iommu", subject, "passes through")
    if kind is None:
        return TOPIC.unknown("iommu", subject, f"{group}/type cannot be read")
    fix = (
        "grubby --update-kernel=ALL --args=iommu=pt (Debian: add iommu=pt to"
        " GRUB_CMDLINE_LINUX in /etc/default/grub, then update-grub), then reboot"
    )
    return TOPIC.warning("iommu", subject, f"{kind}: it translates, should be identity", fix)
