"""The code of docs/transfer/transfer.md runs."""

import json
import re

from ..pages import ROOT, run_block

PAGE = (ROOT / "docs/transfer/transfer.md").read_text()


def test_documentation_code_runs():
    names = run_block("transfer/transfer", 0, {})
    assert names["ticket"].done and (names["cache"] == names["other"]).all()
    run_block("transfer/transfer", 1, {})
    run_block("transfer/transfer", 2, {})  # it asserts what it shows


HEADS = {"tcp": "tcp", "shm, into memory of any kind": "shm", "shm, mapped": "shm-mapped"}


def tables():
    """The transport, and the rows, of each table of all sizes; a row's cells after its first."""
    for head, transport in HEADS.items():
        table = re.search(rf"^\| {head} \| GB/s \| Mooncake.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.M)
        assert table, head
        lines = [line.strip("|").split("|") for line in table[1].splitlines()]
        yield transport, [(name.strip(), cells) for name, *cells in lines]


def figures(row):
    """A row of the results, as the page has it."""
    by_name = {name: value for name, value in row.items() if not name.endswith("_quartiles")}
    nixl = next(value for name, value in by_name.items() if name.startswith("x_nixl"))
    baselines = ("x_stream", "x_memcpy", "x_memcpy-mapped")
    [baseline] = [by_name[name] for name in baselines if name in by_name]
    return by_name["gb_per_s"], by_name["x_mooncake"], nixl, baseline


def test_documented_figures_match_the_results():
    _, *lines = (ROOT / "bench/results/transfer.jsonl").read_text().splitlines()
    rows = {row["case"]: row for row in map(json.loads, lines)}
    for transport, lines in tables():
        assert len(lines) == 12
        for name, cells in lines:
            verb, count, size, unit = re.fullmatch(
                r"(write|read) ([\d,]+) x (\d+) (KiB|MiB)", name
            ).groups()
            kib = int(size) << (10 if unit == "MiB" else 0)
            row = rows[f"{transport} {verb}, {count.replace(',', '')} x {kib} KiB"]
            for text, value in zip(cells, figures(row), strict=True):
                number = text.strip(" x")
                assert float(number) == round(value, len(number.partition(".")[2])), (name, text)
