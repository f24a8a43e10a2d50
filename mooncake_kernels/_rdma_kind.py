"""Whether an RDMA device is of a kind that transfers can use: InfiniBand and RoCE are."""

from . import _host
from ._machine_root import MachineRoot

_AMAZON = 0x1D0F
_EFA = range(0xEFA0, 0xEFB0)


def why_unusable(root: MachineRoot, folder: str) -> str:
    """Return why a device, by its folder in sysfs, has no queue pairs for transfers.

    iWARP's connect by rdma_cm alone; EFA, usNIC and others have no RC queue pairs. Empty if it has
    them, or if files do not tell.
    """
    node_type = (root.text(f"{folder}/node_type") or "").partition(":")[2].strip()
    vendor = root.integer(f"{folder}/device/vendor") or 0
    return _host.rdma_why_unusable(node_type, vendor if 0 <= vendor < 1 << 32 else 0)


def why_unusable_function(vendor: int, device: int) -> str:
    """Return the same of a PCI function, by its numbers, which tell EFA alone."""
    is_efa = vendor == _AMAZON and device in _EFA
    return _host.rdma_why_unusable("", vendor) if is_efa else ""
