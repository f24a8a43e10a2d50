"""The README's code runs; what the first pages list is what the package has; pictures are drawn."""

import re
import runpy

from mooncake_kernels import config
from mooncake_kernels.doctor.examine import CHECKS_OF

from .pages import ROOT, run_block

README = (ROOT / "README.md").read_text()


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def test_the_code_of_the_readme_runs():
    [example] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})


def test_api_example_runs(monkeypatch):
    monkeypatch.chdir(ROOT)
    run_block("start/api", 0, {})


def test_settings_table_matches_config():
    for name, default, doc in config.table():
        assert f"| `{name}` | {default} | {doc} |" in page("start/settings.md")


def test_doctor_check_count_is_current():
    assert f"{sum(map(len, CHECKS_OF.values()))} checks" in page("status.md")


def test_every_extra_is_named_and_no_other():
    project = (ROOT / "pyproject.toml").read_text()
    [extras] = re.findall(r"optional-dependencies\]\n(.*?)\n\[", project, re.DOTALL)
    [told] = re.findall(r"^Extras: (.*?)\.$", page("start/install.md"), re.DOTALL | re.MULTILINE)
    assert set(re.findall(r"^(\w+) = \[", extras, re.MULTILINE)) == set(
        re.findall(r"`\[(\w+)\]`", told)
    )


def test_the_packages_are_named_alike():
    """tests/fresh_machine reads those of the README."""
    packages = re.compile(r"`apt install (python3-venv [^`]*)`")
    assert packages.findall(README) == packages.findall(page("start/install.md")) != []


def test_the_front_pages_are_short():
    assert len(README) <= 8000 and len((ROOT / "CHANGELOG.md").read_text()) <= 3000


def test_the_cells_of_the_status_are_short():
    for line in page("status.md").splitlines():
        assert not line.startswith("|") or max(map(len, line.split(" | "))) <= 250, line


def test_the_picture_of_speeds_is_that_of_the_results():
    draw = runpy.run_path(str(ROOT / "docs/speed.py"))["draw"]
    assert page("speed.svg") == draw()
