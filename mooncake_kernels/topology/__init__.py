"""Which NIC to use for which memory, and why: from sysfs, NVML, NCCL's XML or a saved JSON."""

from .balancer import Balancer
from .model import Gpu, Nic, NumaNode, PathKind, PciNode, System
from .policy import NicPolicy
from .topology import Topology

__all__ = [
    "Balancer",
    "Gpu",
    "Nic",
    "NicPolicy",
    "NumaNode",
    "PathKind",
    "PciNode",
    "System",
    "Topology",
]
