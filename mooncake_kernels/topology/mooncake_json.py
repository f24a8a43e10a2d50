"""Mooncake's priority matrix: {location: [[preferred NICs], [the other NICs]]}."""

import json
from collections.abc import Mapping

from .choose import Choice
from .model import PathKind


def matrix_of(choices: Mapping[str, Choice]) -> dict[str, list[list[str]]]:
    """Return the matrix: preferred is the best tier, in the order of `choose_nics`.

    As in Mooncake, a NIC that cannot be used is in neither list, and the NICs of another NUMA node
    are not preferred for host memory, even if there are no others. Unlike there, a NIC of the same
    node is preferred only if it is as fast as the best one.
    """
    matrix = {}
    for location, choice in choices.items():
        tiers = [[one.nic.name for one in tier] for tier in choice.tiers]
        far = location.startswith("cpu:") and choice.tiers and _is_far(choice)
        preferred = [] if far or not tiers else tiers[0]
        others = [name for tier in tiers for name in tier if name not in preferred]
        matrix[location] = [preferred, others]
    return matrix


def _is_far(choice: Choice) -> bool:
    best = choice.tiers[0][0]
    return best.kind == PathKind.SYS and not best.is_declared


def to_text(matrix: Mapping[str, list[list[str]]]) -> str:
    r"""Return the text that Mooncake's own Topology::toString() gives for the same matrix.

    That is jsoncpp's toStyledString: keys sorted as bytes, tabs, ``" : "`` after a key and the
    value on the next line, one name per line, ``[]`` for an empty list, a newline at the end.
    """
    if not matrix:
        return "{}\n"
    entries = []
    for location in sorted(matrix, key=str.encode):
        lists = ",\n".join("\t\t" + _list(names) for names in matrix[location])
        entries.append(f"\t{json.dumps(location)} : \n\t[\n{lists}\n\t]")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def _list(names: list[str]) -> str:
    if not names:
        return "[]"
    return "[\n" + ",\n".join("\t\t\t" + json.dumps(name) for name in names) + "\n\t\t]"
