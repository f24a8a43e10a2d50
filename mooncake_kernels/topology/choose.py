"""Which NICs a location should use, in which order, and why not the others.

A NIC is ranked by the kind of its path, then by bandwidth (of the narrowest link of the path, or of
its port), state of the port, link layer, whether it is a virtual function, and NUMA node. NICs that
are equal in all of these form a tier; `spread` decides which of them a GPU uses first, for all GPUs
of the machine together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from .model import LINK_LAYERS, Nic, PathKind, System, bus_order
from .paths import Place, gb_per_s_of, kind_of
from .policy import NicPolicy
from .spread import spread


@dataclass(frozen=True)
class Candidate:
    """A NIC that may be chosen for a location."""

    nic: Nic
    kind: PathKind
    path_gb_per_s: float | None
    is_declared: bool
    is_far: bool

    @property
    def gb_per_s(self) -> float:
        """Bandwidth between it and the location; infinite if unknown."""
        port = None if self.nic.gbit_per_s is None else self.nic.gbit_per_s / 8
        speeds = [speed for speed in (self.path_gb_per_s, port) if speed is not None]
        return min(speeds, default=float("inf"))

    def rank(self) -> tuple[bool, int, float, bool, int, bool, bool]:
        """Return its rank: smaller is better; equal ranks form a tier."""
        return (
            not self.is_declared,
            self.kind,
            -round(self.gb_per_s, 1),
            self.nic.state not in ("ACTIVE", ""),
            LINK_LAYERS.index(self.nic.link_layer),
            self.nic.is_vf,
            self.is_far,
        )


@dataclass(frozen=True)
class Choice:
    """The decision for one location."""

    tiers: list[list[Candidate]]
    reasons: dict[str, str]  # NIC name to the reason why it is in no tier


def choose(
    system: System,
    places: Mapping[str, Place],
    unreachable: Mapping[tuple[str, str], str],
    policy: NicPolicy,
) -> dict[str, Choice]:
    """Decide for every location of a machine."""
    refused = _refused_everywhere(system, places, policy)
    choices = {}
    for location in [name for name in places if name.startswith(("cpu:", "cuda:"))]:
        reasons = dict(refused)
        found = []
        for nic in system.nics:
            if (location, nic.name) in unreachable:
                reasons[nic.name] = f"cannot reach {location}: {unreachable[location, nic.name]}"
            if nic.name in reasons:
                continue
            candidate = _candidate(nic, places[location], places[nic.name], policy)
            if candidate.kind > policy.max_path and not candidate.is_declared:
                reasons[nic.name] = (
                    f"its path is {candidate.kind.name}, beyond {policy.max_path.name}"
                )
            else:
                found.append(candidate)
        found.sort(key=Candidate.rank)
        tiers = [list(tier) for _, tier in groupby(found, key=Candidate.rank)]
        choices[location] = Choice(tiers, reasons)
    _spread(system, choices)
    return choices


def _candidate(nic: Nic, place: Place, nic_place: Place, policy: NicPolicy) -> Candidate:
    return Candidate(
        nic,
        kind_of(place, nic_place),
        gb_per_s_of(place, nic_place),
        nic.name in policy.declared(place.name),
        place.numa != nic_place.numa,
    )


def _spread(system: System, choices: dict[str, Choice]) -> None:
    """Order the tiers of all GPUs by PCI address, regardless of a process's numbering."""
    gpus = [choices[str(gpu)] for gpu in sorted(system.gpus, key=lambda gpu: bus_order(gpu.pci))]
    names = [[[one.nic.name for one in tier] for tier in choice.tiers] for choice in gpus]
    for choice, ordered in zip(gpus, spread(names), strict=True):
        for tier, order in zip(choice.tiers, ordered, strict=True):
            tier.sort(key=lambda one: order.index(one.nic.name))


def _refused_everywhere(
    system: System, places: Mapping[str, Place], policy: NicPolicy
) -> dict[str, str]:
    """Return, by name, the NICs that no location may use, and why."""
    reasons = {nic.name: _reason_against(nic, policy) for nic in system.nics}
    refused = {name: reason for name, reason in reasons.items() if reason}
    usable = [nic for nic in system.nics if nic.name not in refused]
    if not policy.allow_management:
        beside_gpu = {
            nic.name
            for nic in usable
            for gpu in system.gpus
            if kind_of(places[nic.name], places[str(gpu)]) <= PathKind.PXB
        }
        refused |= _management(usable, beside_gpu, policy)
    return refused


def _reason_against(nic: Nic, policy: NicPolicy) -> str:
    if nic.unusable:
        return nic.unusable
    if nic.name in policy.deny:
        return "the policy denies it"
    if policy.allow is not None and nic.name not in policy.allow:
        return "it is not on the policy's allow list"
    if nic.state not in ("ACTIVE", "") and not policy.allow_down:
        return f"port {nic.port} is {nic.state}"
    if policy.link_layers is not None and nic.link_layer not in policy.link_layers:
        wanted = " or ".join(policy.link_layers)
        return f"its link layer is {nic.link_layer or 'unknown'}, not {wanted}"
    if nic.link_layer == "Ethernet" and nic.has_gid is False:
        return f"port {nic.port} has no GID: RoCE has no address there"
    return ""


def _management(nics: list[Nic], beside_gpu: set[str], policy: NicPolicy) -> dict[str, str]:
    """Return the usable NICs that look like management NICs, and why.

    That is a port slower than half of the fastest one; and one that carries the default route, if
    another, at least as fast, does not, and it is not on a GPU's PCI switch, where no one puts a
    management NIC. A NIC that the caller named is never one.
    """
    named = {nic for field, nic in policy.names() if field != "deny"}
    fastest = max((nic.gbit_per_s or 0.0 for nic in nics), default=0.0)
    reasons = {}
    for nic in nics:
        speed = nic.gbit_per_s
        if speed is not None and speed < policy.min_speed_ratio * fastest:
            reasons[nic.name] = (
                f"{speed:g} Gb/s compared with {fastest:g} Gb/s: taken for a management NIC"
            )
    others = [nic for nic in nics if nic.name not in reasons and not nic.has_default_route]
    best_other = max((nic.gbit_per_s or 0.0 for nic in others), default=-1.0)
    for nic in nics:
        is_only_one = best_other < (nic.gbit_per_s or 0.0)
        if nic.has_default_route and not is_only_one and nic.name not in beside_gpu | set(reasons):
            reasons[nic.name] = "it carries the default route: taken for a management NIC"
    return {name: reason for name, reason in reasons.items() if name not in named}
