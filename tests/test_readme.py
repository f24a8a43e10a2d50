"""The README's code runs, and its tables match the package."""

import re
from pathlib import Path

from mooncake_kernels import config
from mooncake_kernels.doctor.examine import CHECKS_OF

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_api_in_one_screen_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    [example] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})


def test_the_settings_are_those_of_config():
    for name, default, doc in config.table():
        assert f"| `{name}` | {default} | {doc} |" in README


def test_every_file_it_names_is_there():
    for target in re.findall(r"\]\((?!https?:|#)([^)]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_doctor_has_as_many_checks_as_it_says():
    count = sum(map(len, CHECKS_OF.values()))
    for text in (README, (ROOT / "docs/status.md").read_text()):
        assert f": {count} checks" in text


def test_it_names_every_extra_but_no_other():
    project = (ROOT / "pyproject.toml").read_text()
    [extras] = re.findall(r"optional-dependencies\]\n(.*?)\n\[", project, re.DOTALL)
    [told] = re.findall(r"^Extras: (.*?)\. Settings", README, re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"^(\w+) = \[", extras, re.MULTILINE)) == set(
        re.findall(r"`\[(\w+)\]`", told)
    )
