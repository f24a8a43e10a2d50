"""The README's code runs, and its tables are what the package says."""

import re
from pathlib import Path

from mooncake_kernels import config

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
