"""Run the checks; a failure to check, or an exception, is a finding too."""

import dataclasses
from collections.abc import Callable, Iterable
from functools import partial

from .._machine_root import MachineRoot
from . import pci, ports
from .checks import (
    bonding,
    dmabuf,
    gids,
    gpu,
    isolation,
    libraries,
    limits,
    memory,
    mr,
    mtu,
    numa,
    pcie,
    permissions,
    rdma_ports,
)
from .commands import with_packages
from .finding import Finding, State, Topic
from .here import Here

TOPICS: tuple[Topic, ...] = tuple(
    module.TOPIC
    for module in (libraries, gpu, dmabuf, rdma_ports, gids, mtu, bonding, permissions, limits,
                   mr, pcie, isolation, numa, memory)
)  # fmt: skip
CHECKS_OF = {topic.name: tuple(topic.why) for topic in TOPICS}
Check = Callable[[], Iterable[Finding]]


def examine(root: MachineRoot, here: Here, only: frozenset[str] = frozenset()) -> list[Finding]:
    """Return the findings of all checks, or of the named groups and checks."""
    findings = []
    for topic, check in _checks(root, here).items():
        names = CHECKS_OF[topic]
        if only and only.isdisjoint((topic, *names)):
            continue
        for finding in _run(topic, check):
            if not only or topic in only or finding.check in (*only, topic):
                findings.append(_executable(finding, here))
    return findings


def topic_of(finding: Finding) -> str:
    """Return the group of a check; a check that raised is named after its group."""
    for name, checks in CHECKS_OF.items():
        if finding.check in checks:
            return name
    return finding.check


def _executable(finding: Finding, here: Here) -> Finding:
    fix = finding.fix and with_packages(finding.fix, here.missing_commands)
    return dataclasses.replace(finding, fix=fix)


def _run(topic: str, check: Check) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:  # noqa: BLE001 - one check must not hide the others
        detail = f"the check failed: {type(error).__name__}: {error}"
        why = "what it looks at is not known"
        return [Finding(topic, "doctor", State.UNKNOWN, detail, None, why)]


def _checks(root: MachineRoot, here: Here) -> dict[str, Check]:
    all_ports = ports.ports(root)
    gpus = {address: f"GPU {address}" for address in pci.gpus(root)}
    nics: dict[str, str] = {}
    for device in ports.devices(root):
        address = ports.address_of(root, device)
        if address:
            nics.setdefault(address, f"{device} ({address})")
    return {
        "libraries": partial(libraries.check, root, here, gpus),
        "gpu": partial(gpu.check, root, gpus, here.gpu_memory_bytes),
        "gpu_registration": partial(dmabuf.check, root, gpus, here.has_dmabuf_call),
        "ports": partial(rdma_ports.check, root, all_ports),
        "addresses": partial(gids.check, root, all_ports),
        "mtu": partial(mtu.check, root, all_ports, here.devices),
        "bonding": partial(bonding.check, root, all_ports),
        "permissions": partial(permissions.check, root, here.open_errors),
        "limits": partial(limits.check, root, gpus),
        "regions": partial(mr.check, root, here.devices),
        "pcie": partial(pcie.check, root, gpus, nics),
        "isolation": partial(isolation.check, root, gpus, nics),
        "numa": partial(numa.check, root, gpus, nics),
        "memory": partial(memory.check, root),
    }
