"""The code of docs/transfer.md runs."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/transfer.md").read_text()


def test_the_pages_code_runs():
    first, by_key = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict = {}
    exec(compile(first, "docs/transfer.md", "exec"), names)
    assert names["ticket"].done and (names["cache"] == names["other"]).all()
    exec(compile(by_key, "docs/transfer.md", "exec"), {})  # it asserts what it shows


def test_the_pages_figures_are_those_of_the_results():
    results = json.loads((ROOT / "bench/results/transfer.json").read_text())
    rows = {row["case"]: row for row in results["rows"]}
    lines = re.findall(r"^\| (write|read) ([\d,]+) x (\d+) (KiB|MiB) \| ([\d.]+) \|", PAGE, re.M)
    assert len(lines) == 20
    for i, (verb, count, size, unit, gb_per_s) in enumerate(lines):
        kib = int(size) << (10 if unit == "MiB" else 0)
        transport = "tcp" if i < 10 else "shm"
        row = rows[f"{transport} {verb}, {count.replace(',', '')} x {kib} KiB"]
        assert gb_per_s == f"{row['gb_per_s']:.2f}"
