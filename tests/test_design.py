"""What docs/internals/design.md says is in the house is there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mooncake_kernels.__main__ import main

ROOT = Path(__file__).parent.parent
DESIGN = (ROOT / "docs/internals/design.md").read_text()
[HOUSE] = re.findall(r"## 2\. The house\n\n```\n(.*?)```", DESIGN, re.DOTALL)
FILES = (".py", ".pyi", ".h", ".so", ".md", ".sh")
NOT_THERE = {"_ops.py", ".so"}  # the first on purpose; the second is an ending


def rooms() -> Iterator[tuple[Path, Path, str]]:
    """The tree and the folder that each line is about, and the line."""
    top = folder = ROOT
    for line in HOUSE.splitlines():
        first = line.split()[0]
        if line[0] != " ":
            top = folder = ROOT / first if first.endswith("/") else ROOT
        elif line[2] != " " and first.endswith("/"):
            folder = top / first
        elif line[2] != " ":
            folder = top
        yield top, folder, line


def is_there(top: Path, folder: Path, name: str) -> bool:
    return (
        any((place / name).exists() for place in (ROOT, top, folder.parent))
        or any(folder.rglob(name))
        or any(path.name == name for path in (ROOT / "docs").rglob("*.md"))
    )


@pytest.mark.parametrize("top, folder, line", list(rooms()))
def test_its_folders_and_files_are_there(top, folder, line):
    for word in re.findall(r"[\w./<>*-]+", line):
        name = word.rstrip(".")
        if name.endswith(("/", *FILES)) and not re.search(r"[<*]", name):
            name = name.strip("/")
            assert name in NOT_THERE or is_there(top, folder, name), f"{name} of {folder.name}"


def test_its_commands_are_those_of_the_command_line(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    [commands] = re.findall(r"{(.*?)}", capsys.readouterr().out)[:1]
    [listed] = re.findall(r"`python -m mooncake_kernels (doctor .*?)`", HOUSE)
    assert sorted(listed.split(" | ")) == sorted(commands.split(","))


def test_its_names_are_those_of_files_or_functions():
    sources = [
        path
        for folder in ("csrc", "mooncake_kernels", "python")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".h", ".cc")
    ]
    known = {path.stem for path in sources}
    known |= {path.name for path in (ROOT / "tests").iterdir()} | {
        "mooncake_kernels",
        "mooncake_serving",
    }
    known |= {path.stem for path in (ROOT / "bench").iterdir()}
    text = "\n".join(path.read_text() for path in sources if path.suffix == ".py")
    known |= set(re.findall(r"(?:def |class |^)(\w+)(?: =|[(:])", text, re.MULTILINE))
    words = re.findall(r"(?<![\w./<])[a-z0-9]+(?:_[a-z0-9]+)+(?![\w/.<>*]|\.\w)", HOUSE)
    assert [word for word in words if word not in known] == []
