"""Why NICs were chosen for a location, and why not: one line each."""

from .choose import Candidate, Choice
from .model import Nic, System


def explain(system: System, location: str, choice: Choice, limit: int | None) -> str:
    """Return the lines: chosen NICs in order, then the others."""
    if not system.nics:
        return f"{location}: this machine has no NIC for RDMA"
    lines, number = [], 0
    for tier in choice.tiers:
        for candidate in tier:
            number += 1
            beyond = limit is not None and number > limit
            equals = [str(other.nic) for other in tier if other is not candidate]
            head = f"not chosen: the policy's limit is {limit};" if beyond else f"no. {number}:"
            lines.append(f"{candidate.nic}: {head} {', '.join(_facts(candidate, equals))}")
    lines += [
        f"{nic}: not chosen: {choice.reasons[nic.name]}"
        for nic in system.nics
        if nic.name in choice.reasons
    ]
    return "\n".join(lines)


def _facts(candidate: Candidate, equals: list[str]) -> list[str]:
    nic = candidate.nic
    facts = ["declared near"] if candidate.is_declared else []
    path = "" if candidate.path_gb_per_s is None else f" ({candidate.path_gb_per_s:.1f} GB/s)"
    facts.append(f"path {candidate.kind.name}{path}")
    facts.append(port_facts(nic))
    facts += ["a virtual function"] if nic.is_vf else []
    facts.append("another NUMA node" if candidate.is_far else "same NUMA node")
    if equals:
        facts.append(f"as good as {', '.join(equals)}")
    return facts


def port_facts(nic: Nic) -> str:
    """Return ``port 1 400 Gb/s InfiniBand ACTIVE``, without what is unknown."""
    speed = "" if nic.gbit_per_s is None else f"{nic.gbit_per_s:g} Gb/s"
    facts = [f"port {nic.port}", speed, nic.link_layer, nic.state]
    return " ".join(fact for fact in facts if fact)
