"""A machine as JSON, one line per part, for people to read and write. Format 1.

``{"format": 1, "numa": [...], "pci": [...], "gpus": [...], "nics": [...], "unreachable": [...]}``.
Each entry has the fields of its class in `model`; a field with its default value may be omitted. An
entry of "unreachable" is {"location", "nic", "reason"}.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from .check import checked
from .model import Gpu, Malformed, Nic, NumaNode, PciNode, System

FORMAT = 1
Unreachable = dict[tuple[str, str], str]  # (location, NIC) to the reason
_Part = TypeVar("_Part", NumaNode, PciNode, Gpu, Nic)


def to_text(system: System, unreachable: Mapping[tuple[str, str], str]) -> str:
    """Return the JSON text."""
    groups: dict[str, list[dict[str, Any]]] = {
        "numa": [_entry(part) for part in system.numa],
        "pci": [_entry(part) for part in system.pci],
        "gpus": [_entry(part) for part in system.gpus],
        "nics": [_entry(part) for part in system.nics],
        "unreachable": [
            {"location": location, "nic": nic, "reason": reason}
            for (location, nic), reason in sorted(unreachable.items())
        ],
    }
    lines = [f'{{"format": {FORMAT}']
    for name, entries in groups.items():
        rows = ",\n".join("  " + json.dumps(entry) for entry in entries)
        lines.append(f' "{name}": [\n{rows}\n ]' if rows else f' "{name}": []')
    return ",\n".join(lines) + "\n}\n"


def _entry(part: NumaNode | PciNode | Gpu | Nic) -> dict[str, Any]:
    defaults = {field.name: field.default for field in dataclasses.fields(part)}
    values = dataclasses.asdict(part)
    return {name: value for name, value in values.items() if value != defaults[name]}


def read_json(path: Path) -> tuple[System, Unreachable]:
    """Read a file.

    Raises:
        Malformed: it is not such a file; the message says why.
        OSError: it cannot be read.
    """
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Malformed(f"it is not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        got = document.get("format") if isinstance(document, dict) else type(document).__name__
        raise Malformed(f"its format must be {FORMAT}, got {got!r}")
    unknown = set(document) - {"format", "numa", "pci", "gpus", "nics", "unreachable"}
    if unknown:
        raise Malformed(f"it has no part {min(unknown)!r}")
    system = checked(
        System(
            numa=_parts(document, "numa", NumaNode) or (NumaNode(0),),
            pci=_parts(document, "pci", PciNode),
            gpus=_parts(document, "gpus", Gpu),
            nics=_parts(document, "nics", Nic),
        )
    )
    return system, _unreachable(document)


def _parts(document: dict[str, Any], group: str, part: type[_Part]) -> tuple[_Part, ...]:
    return tuple(_part(entry, f"{group}[{i}]", part) for i, entry in _entries(document, group))


def _entries(document: dict[str, Any], group: str) -> list[tuple[int, dict[str, Any]]]:
    entries = document.get(group, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise Malformed(f"{group} must be a list of objects, got {str(entries)[:80]}")
    return list(enumerate(entries))


def _part(entry: dict[str, Any], where: str, part: type[_Part]) -> _Part:
    types_of = typing.get_type_hints(part)
    unknown = set(entry) - set(types_of)
    if unknown:
        raise Malformed(f"{where} has no field {min(unknown)!r}")
    for field in dataclasses.fields(part):
        if field.name not in entry and field.default is dataclasses.MISSING:
            raise Malformed(f"{where} must have {field.name}")
    values = {
        name: _value(value, types_of[name], f"{where}.{name}") for name, value in entry.items()
    }
    return part(**values)


def _value(value: Any, expected: Any, where: str) -> Any:
    """Return the value in the field's type: lists become tuples, integers numbers.

    Raises:
        Malformed: it has another type.
    """
    origin, inner = typing.get_origin(expected), typing.get_args(expected)
    if origin is types.UnionType:
        return None if value is None else _value(value, inner[0], where)
    if origin is tuple and isinstance(value, list):
        if inner[-1] is Ellipsis:
            return tuple(_value(item, inner[0], where) for item in value)
        if len(value) == len(inner):
            return tuple(_value(item, kind, where) for item, kind in zip(value, inner, strict=True))
    if expected is float and type(value) in (int, float) and 0 <= value < 1e9:
        return float(value)
    if expected is int and type(value) is int and -1 <= value < 1 << 32:
        return value
    if expected in (str, bool) and type(value) is expected:
        return value
    name = expected.__name__ if isinstance(expected, type) else str(expected)
    raise Malformed(f"{where} must be {name}, got {str(value)[:80]!r}")


def _unreachable(document: dict[str, Any]) -> Unreachable:
    found: Unreachable = {}
    for i, entry in _entries(document, "unreachable"):
        texts = [entry.get(key) for key in ("location", "nic", "reason")]
        if not all(isinstance(text, str) for text in texts) or len(entry) != len(texts):
            raise Malformed(f"unreachable[{i}] must have location, nic and reason, got {entry}")
        location, nic, reason = texts
        found[str(location), str(nic)] = str(reason)
    return found
