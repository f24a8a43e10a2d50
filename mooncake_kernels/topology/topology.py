"""Topology: one machine, and which NIC is near which memory."""

import os
import threading
from collections.abc import Sequence
from typing import Any

from ..errors import InvalidArgument
from . import explain, json_format, mooncake_json, nccl_xml, render, svg
from .balancer import Balancer
from .check import checked
from .choose import Choice, choose
from .gpu_order import reordered, visible_gpus
from .model import Gpu, Malformed, Nic, NumaNode, PathKind, System
from .paths import gb_per_s_of, kind_of, places_of
from .policy import NicPolicy
from .sources import discover_system, read_file

_DEFAULT = NicPolicy()
_MAX_POLICIES = 64  # whose choices are cached


class Topology:
    """A machine's processors, GPUs and NICs, and the PCI tree between them.

    A location is ``"cpu:<NUMA node>"`` or ``"cuda:<index>"``; a NIC is identified by its name. All
    calls also accept the ``Gpu`` or ``Nic`` itself. GPUs are numbered as by NVML or an XML's
    ``dev``, else by PCI address: use ``with_visible_gpus`` in a process with another numbering
    (CUDA_VISIBLE_DEVICES), or ``with_gpu_order``. Thread-safe. Made by ``discover``,
    ``from_nccl_xml`` or ``from_json``.

    Raises:
        InvalidArgument: the parts of ``system`` are inconsistent; the message names one.
    """

    def __init__(self, system: System, unreachable: json_format.Unreachable | None = None):
        try:
            self._system = checked(system)
        except Malformed as error:
            raise InvalidArgument(f"Topology: system must be a machine: {error}") from None
        self._places = places_of(system)
        self._lock = threading.Lock()
        self._choices: dict[NicPolicy, dict[str, Choice]] = {}
        self._chosen: dict[tuple[str, NicPolicy | None], tuple[Nic, ...]] = {}
        self._unreachable: json_format.Unreachable = {}
        for (location, nic), reason in (unreachable or {}).items():
            self.mark_unreachable(location, nic, reason)

    @classmethod
    def discover(cls, root: str | os.PathLike[str] = "/") -> "Topology":
        """Read the machine: sysfs and /proc under a root, and NVML if that is this machine's.

        Raises:
            InvalidArgument: there is no /sys, or its contents are inconsistent; the message names
                the device or file.
        """
        return cls(discover_system(root))

    @classmethod
    def from_nccl_xml(cls, path: str | os.PathLike[str]) -> "Topology":
        """Read a file written by NCCL_TOPO_DUMP_FILE, or a cloud's NCCL_TOPO_FILE.

        Raises:
            InvalidArgument: it cannot be read, or is not such a file; the message says why.
        """
        return cls(
            read_file("from_nccl_xml", "NCCL's topology as XML", nccl_xml.read_nccl_xml, path)
        )

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> "Topology":
        """Read the output of ``to_json``.

        Raises:
            InvalidArgument: it cannot be read, or is not such a file; the message says why.
        """
        what = "a topology saved as JSON"
        system, unreachable = read_file("from_json", what, json_format.read_json, path)
        try:
            return cls(system, unreachable)
        except InvalidArgument as error:
            raise InvalidArgument(f"from_json: path must be {what}, got {path}: {error}") from None

    @property
    def system(self) -> System:
        """The machine as plain data."""
        return self._system

    @property
    def nics(self) -> tuple[Nic, ...]:
        """The NICs, by name."""
        return self._system.nics

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs, cuda:0 first."""
        return self._system.gpus

    @property
    def numa_nodes(self) -> tuple[NumaNode, ...]:
        """The NUMA nodes with processors."""
        return self._system.numa

    @property
    def locations(self) -> list[str]:
        """The places NICs can be chosen for: ``cpu:0``, ..., ``cuda:0``, ..."""
        return [name for name in self._places if name.startswith(("cpu:", "cuda:"))]

    @property
    def unreachable(self) -> dict[tuple[str, str], str]:
        """(location, NIC) to the reason why the NIC cannot reach it."""
        return dict(self._unreachable)

    def path(self, a: str | Gpu | Nic, b: str | Gpu | Nic) -> PathKind:
        """Return how two places (locations or NICs) are connected.

        Raises:
            InvalidArgument: there is no such place.
        """
        return kind_of(self._place("path", "a", a), self._place("path", "b", b))

    def path_bandwidth(self, a: str | Gpu | Nic, b: str | Gpu | Nic) -> float | None:
        """Return GB/s of the narrowest PCI link between two places, in one direction.

        A NIC's port is not part of the path, and no file describes the link between sockets. None
        if no link of the path has a plausible value.

        Raises:
            InvalidArgument: there is no such place.
        """
        op = "path_bandwidth"
        return gb_per_s_of(self._place(op, "a", a), self._place(op, "b", b))

    def choose_nics(self, location: str | Gpu, *, policy: NicPolicy | None = None) -> list[Nic]:
        """Return the NICs for a location, best first; [] if there are none.

        The order: kind of the path, bandwidth, state of the port, link layer, NUMA node; ties are
        spread over all GPUs of the machine, identically in every process. Not chosen are ports that
        are down, Ethernet ports without a GID, NICs that look like management NICs (slower than
        half of the fastest; or carrying the default route, on no GPU's switch, and not the only one
        that fast), and those marked unreachable. ``explain`` gives the reason for each.

        Raises:
            InvalidArgument: there is no such location, or the policy names a NIC or a
                location that does not exist.
        """
        try:
            chosen = self._chosen.get((location, policy))  # type: ignore[arg-type]
        except TypeError:  # unhashable, so neither; reported below
            chosen = None
        return list(self._choose(str(location), policy) if chosen is None else chosen)

    def nic_tiers(
        self, location: str | Gpu, *, policy: NicPolicy | None = None
    ) -> list[tuple[Nic, ...]]:
        """Return the NICs for a location in tiers of equally good ones; without a limit.

        Raises:
            InvalidArgument: as for ``choose_nics``.
        """
        choice = self._choice("nic_tiers", str(location), policy or _DEFAULT)
        return [tuple(candidate.nic for candidate in tier) for tier in choice.tiers]

    def explain(self, location: str | Gpu, *, policy: NicPolicy | None = None) -> str:
        """Say why NICs are chosen for a location, and why others are not: one line each.

        Raises:
            InvalidArgument: as for ``choose_nics``.
        """
        policy = policy or _DEFAULT
        choice = self._choice("explain", str(location), policy)
        return explain.explain(self._system, str(location), choice, policy.limit)

    def balancer(self, policy: NicPolicy | None = None) -> Balancer:
        """Return a balancer that chooses among equals by load, for every location, as of now.

        Raises:
            InvalidArgument: the policy names a NIC that does not exist.
        """
        policy = policy or _DEFAULT
        return Balancer(self._system, self._choices_of("balancer", policy), policy.limit)

    def mark_unreachable(self, location: str | Gpu, nic: str | Nic, reason: str) -> None:
        """Record that a NIC cannot reach a location's memory, as found by a probe.

        Raises:
            InvalidArgument: there is no such location or NIC.
        """
        key = self._pair("mark_unreachable", location, nic)
        with self._lock:
            self._unreachable[key] = str(reason)
            self._choices, self._chosen = {}, {}

    def mark_reachable(self, location: str | Gpu, nic: str | Nic) -> None:
        """Undo ``mark_unreachable``.

        Raises:
            InvalidArgument: there is no such location or NIC.
        """
        key = self._pair("mark_reachable", location, nic)
        with self._lock:
            self._unreachable.pop(key, None)
            self._choices, self._chosen = {}, {}

    def with_gpu_order(self, order: Sequence[int | str | Gpu]) -> "Topology":
        """Return the topology as seen by a process whose cuda:i is the i-th of ``order``.

        Args:
            order: indices of this topology, PCI addresses, UUIDs or GPUs. Those that are left out
                come after them: other processes use them, so they take part in the spread.

        Raises:
            InvalidArgument: it is no list, or a GPU does not exist, or is named twice.
        """
        return Topology(*reordered(self._system, self.unreachable, order))

    def with_visible_gpus(self) -> "Topology":
        """Return this machine's topology as seen by this process: its cuda:i is CUDA's.

        ``with_gpu_order`` of what the variable CUDA_VISIBLE_DEVICES names: indices, in the order of
        CUDA_DEVICE_ORDER=PCI_BUS_ID, or prefixes of UUIDs, up to the first that names no GPU or one
        that was named before. Without the variable, and if it names none, nothing changes.
        """
        seen = visible_gpus(self.gpus)
        return self.with_gpu_order(seen) if seen else self

    def to_json(self) -> str:
        """Return the machine, and which pairs are unreachable, for ``from_json``."""
        return json_format.to_text(self._system, self.unreachable)

    def to_mooncake_json(self, *, policy: NicPolicy | None = None) -> str:
        """Return ``{"cpu:0": [[preferred], [others]], "cuda:0": ...}``, Mooncake's priority matrix.

        Byte-identical to the output of Mooncake's Topology::toString() for this matrix; Mooncake
        reads it from MC_CUSTOM_TOPO_JSON. Preferred is the best tier.

        Raises:
            InvalidArgument: the policy names a NIC that does not exist.
        """
        choices = self._choices_of("to_mooncake_json", policy or _DEFAULT)
        return mooncake_json.to_text(mooncake_json.matrix_of(choices))

    def matrix(self) -> str:
        """Return the kinds of all paths as a table, as ``nvidia-smi topo -m`` prints it."""
        return render.matrix(self._system, self._places)

    def tree(self) -> str:
        """Return the PCI tree as text, with GPUs, NICs and the speed of links."""
        return render.tree(self._system)

    def to_svg(self) -> str:
        """Return a picture of the machine."""
        first = {gpu.pci: [str(nic) for nic in self.choose_nics(gpu)[:1]] for gpu in self.gpus}
        return svg.draw(self._system, {pci: nics[0] for pci, nics in first.items() if nics})

    def __eq__(self, other: object) -> bool:
        """Tell whether both are the same machine with the same pairs known to be unreachable."""
        if not isinstance(other, Topology):
            return NotImplemented
        return (self._system, self._unreachable) == (other._system, other._unreachable)

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __reduce__(self) -> tuple[type, tuple[System, json_format.Unreachable]]:
        """Keep the machine and the marks: other processes make the same choices."""
        return type(self), (self._system, self.unreachable)

    def __repr__(self) -> str:
        """Summarize the parts."""
        return (
            f"Topology({len(self.numa_nodes)} nodes, {len(self.gpus)} GPUs, {len(self.nics)} NICs)"
        )

    def _choose(self, location: str, policy: NicPolicy | None) -> tuple[Nic, ...]:
        policy_or_default = policy or _DEFAULT
        choice = self._choice("choose_nics", location, policy_or_default)
        nics = [candidate.nic for tier in choice.tiers for candidate in tier]
        chosen = tuple(nics[: policy_or_default.limit])
        with self._lock:
            if self._choices.get(policy_or_default, {}).get(location) is choice:
                self._chosen[location, policy] = chosen
        return chosen

    def _choice(self, op: str, location: str, policy: NicPolicy) -> Choice:
        choices = self._choices_of(op, policy)
        return choices[self._location(op, "location", location)]

    def _choices_of(self, op: str, policy: NicPolicy) -> dict[str, Choice]:
        if not isinstance(policy, NicPolicy):
            raise InvalidArgument(f"{op}: policy must be a NicPolicy or None, got {policy!r}")
        with self._lock:
            choices = self._choices.get(policy)
            if choices is None:
                for field, nic in policy.names():
                    self._nic(op, f"policy.{field}", nic)
                for location in dict(policy.affinity):
                    self._location(op, "policy.affinity", location)
                choices = choose(self._system, self._places, self._unreachable, policy)
                if len(self._choices) >= _MAX_POLICIES:
                    self._choices, self._chosen = {}, {}
                self._choices[policy] = choices
            return choices

    def _place(self, op: str, argument: str, name: Any) -> Any:
        place = self._places.get(str(name))
        if place is None:
            known = ", ".join(self._places)
            raise InvalidArgument(f"{op}: {argument} must be one of {known}, got {name!r}")
        return place

    def _nic(self, op: str, argument: str, name: Any) -> str:
        if str(name) not in [nic.name for nic in self.nics]:
            known = ", ".join(nic.name for nic in self.nics) or "none"
            raise InvalidArgument(
                f"{op}: {argument} must be a NIC of this machine ({known}), got {str(name)!r}"
            )
        return str(name)

    def _pair(self, op: str, location: Any, nic: Any) -> tuple[str, str]:
        return self._location(op, "location", location), self._nic(op, "nic", nic)

    def _location(self, op: str, argument: str, name: Any) -> str:
        if str(name) not in self.locations:
            known = ", ".join(self.locations)
            raise InvalidArgument(f"{op}: {argument} must be one of {known}, got {name!r}")
        return str(name)
