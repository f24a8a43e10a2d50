"""NUMA nodes in sysfs, and which of them a device belongs to.

The memory of a GPU may be a separate node without processors (GB200): a device of such a node
belongs to the nearest one with processors. If a device reports -1, its processor list decides.
"""

import re

from .._machine_root import MachineRoot
from .model import NumaNode
from .sysfs_values import cpu_set, integer, warn

_FOLDER = "/sys/devices/system/node"


class NumaReader:
    """The nodes of one machine."""

    def __init__(self, root: MachineRoot):
        self._root = root
        names = [name for name in root.names(_FOLDER) if re.fullmatch(r"node[0-9]{1,6}", name)]
        self._ids = sorted(int(name[4:]) for name in names)
        self._cpus = {i: self._cpu_set(f"{_FOLDER}/node{i}/cpulist") for i in self._ids}
        if not any(self._cpus.values()):  # no information: take all nodes
            self._with_cpus = self._ids
        else:
            text = root.text  # one whose list makes no sense has processors all the same
            self._with_cpus = [i for i in self._ids if text(f"{_FOLDER}/node{i}/cpulist")]

    def nodes(self, known: set[int]) -> tuple[NumaNode, ...]:
        """Return the nodes with processors; the devices' ``known`` ones if that is unknown."""
        ids = self._with_cpus or sorted(known - {-1}) or [0]
        text = self._root.text
        named = [i for i in ids if self._cpus.get(i)]
        cpus = {i: text(f"{_FOLDER}/node{i}/cpulist") or "" for i in named}
        return tuple(NumaNode(i, cpus.get(i, "")) for i in ids)

    def of_device(self, folder: str) -> int:
        """Return a device's node, one that has processors; -1 if unknown."""
        node = integer(self._root, f"{folder}/numa_node", -1)
        if node < 0:
            cpus = self._cpu_set(f"{folder}/local_cpulist")
            near = [i for i in self._with_cpus if cpus & self._cpus[i]]
            return near[0] if len(near) == 1 else -1
        if not self._ids or node in self._with_cpus:
            return node
        if node not in self._ids:
            warn(f"{folder}/numa_node", f"must be one of {self._ids} or -1", str(node))
            return -1
        return self._nearest(node)

    def _nearest(self, node: int) -> int:
        name = f"{_FOLDER}/node{node}/distance"
        text = self._root.text(name) or ""
        try:
            distances = [int(word) for word in text.split()]
        except ValueError:
            warn(name, "must hold integers", text)
            return -1
        if len(distances) != len(self._ids):
            return -1
        return min(self._with_cpus, key=lambda i: (distances[self._ids.index(i)], i))

    def _cpu_set(self, name: str) -> set[int]:
        text = self._root.text(name) or ""
        try:
            return cpu_set(text)
        except ValueError:
            warn(name, "must list processors", text)
            return set()
