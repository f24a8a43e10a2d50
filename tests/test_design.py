"""The house of docs/internals/design.md is the tree."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DESIGN = (ROOT / "docs/internals/design.md").read_text()
[HOUSE] = re.findall(r"## 2\. The house\n\n```\n(.*?)```", DESIGN, re.DOTALL)
TOPS = ("csrc", "mooncake_kernels", "python/mooncake_serving")


def named() -> set[str]:
    """The folders at the beginnings of lines, as paths; a line's indent says what they are in."""
    found, stack = set(), [""]
    for line in HOUSE.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.match(r"\s*((?:[\w/]+/ ?)+)", line)
        del stack[depth + 1 :]
        for name in names[1].split():
            path = f"{stack[depth]}{name}"
            found.add(path.rstrip("/"))
        stack.append(path)
    return found


def folders() -> set[str]:
    """Those with sources, two deep; in csrc/transfer and store, three."""
    deep = ("csrc/transfer", "python/mooncake_serving/store")
    found = set()
    for top in (*TOPS, *deep):
        for path in (ROOT / top).glob("*/"):
            if any(path.rglob("*.py")) or any(path.rglob("*.h")):
                found.add(path.relative_to(ROOT).as_posix())
    return found


def test_its_folders_are_there():
    assert [name for name in sorted(named()) if not (ROOT / name).is_dir()] == []


def test_all_folders_are_in_it():
    assert folders() <= named()
