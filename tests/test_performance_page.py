"""The tables of docs/performance.md have the figures of bench/results."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/performance.md").read_text()


def table(head):
    """The rows of the table whose head begins so: cells, by that of the first column."""
    [rows] = re.findall(rf"^\| {re.escape(head)}.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows.splitlines()]
    return {name: cells for name, *cells in lines}


def results(*names):
    """The rows of results, by case."""
    files = [(ROOT / f"bench/results/{name}.jsonl").read_text() for name in names]
    rows = [json.loads(line) for text in files for line in text.splitlines()[1:]]
    return {row["case"]: row for row in rows if "left_out" not in row}


def agree(cell, value):
    """Whether a cell, to its last digit, is the value; an empty one says nothing."""
    if not cell:
        return True
    number = re.match(r"[\d.]+", cell)[0]
    digits = len(number.partition(".")[2])
    return abs(float(number) - value) <= 0.501 * 10**-digits


def test_copy_tables_match_the_results():
    rows, found = results("copy_blocks", "copy_plan"), table("| median | GB/s | against torch |")
    assert len(found) == 16
    for name, cells in found.items():
        row = rows[name]
        values = row["us"] / 1e3, row["gb_per_s"], row["x_torch"], row["x_memcpy"]
        assert all(map(agree, cells, values)), (name, values)


def test_zen_5_copy_table_matches_the_results():
    rows = results("copy_blocks_zen5", "copy_plan_zen5")
    for name, cells in table("Zen 5 |").items():
        row = rows[name]
        words = row.get("x_torch_words", 0.0)
        values = row["gb_per_s"], row["x_torch"], words, row["x_memcpy"]
        assert all(map(agree, cells, values)), (name, values)


MIXES = {
    "2 MiB": "one", "643 KiB, 1.07, 2 or 3.1 MiB": "blocks", "4 KiB to 4 MiB": "any",
    "nine of 4 KiB, one of 16 MiB": "tiny-large", "1 KiB to 64 MiB, in 2 GiB": "mooncake",
}  # fmt: skip


def test_allocator_table_matches_the_results():
    rows, found = results("allocator"), table("a pool of |")
    assert len(found) == 3
    for name, cells in found.items():
        for percent, cell in zip((50, 90, 99), cells, strict=True):
            row = rows[f"release, allocate: {name.replace(',', '')}, {percent} % full"]
            values = row["ns_allocate"], row["ns_release"]
            assert all(map(agree, cell.split(", "), values)), (name, values)
    found = table("sizes; what is freed")
    assert len(found) == 10
    for name, cells in found.items():
        sizes, _, freed = name.partition("; ")
        row = rows[f"how full: {MIXES[sizes]}, {freed}"]
        values = [100 * row[key] for key in ("first", "refused", "refused_p1", "after")]
        assert all(map(agree, cells, values)), (name, values)


SHAPES = {
    "Llama 8B": "llama-8b", "Llama 70B, TP4": "llama-70b-tp4", "Llama 70B, TP8": "llama-70b-tp8",
    "packed k and v": "packed-kv", "MLA, bfloat16": "mla-bf16", "MLA, fp8": "mla-fp8",
    "MLA rows, bfloat16": "mla-bf16-rows", "MLA rows, fp8": "mla-fp8-rows",
    "hybrid pages": "hybrid-page",
}  # fmt: skip


def test_engine_shapes_table_matches_the_results():
    rows, found = results("kv_shapes"), table("runs of | GB/s |")
    assert len(found) == 10
    for name, cells in found.items():
        shape, _, runs = name.partition(": ")
        random, near = (
            rows[f"H2H {SHAPES[shape]}: {runs}, {ids}"] for ids in ("random", "rows of 16")
        )
        keys = ("gb_per_s", "percent_of_ceiling", "x_torch", "x_memcpy")
        values = [*(random[key] for key in keys), near["x_memcpy"]]
        assert all(map(agree, cells, values)), (name, values)


@pytest.mark.parametrize(
    ("name", "head", "columns"),
    [("kv_transforms", "on the way", ("gb_per_s", "x_torch", "x_plain")),
     ("block_hashes", "| median | against sha", ("us", "x_sha256+pickle", "x_xxhash"))],
)  # fmt: skip
def test_case_tables_match_the_results(name, head, columns):
    rows, found = results(name), table(head)
    assert len(found) == len(rows)
    for case, cells in found.items():
        parts = re.fullmatch(r"names of (\d+ tokens) in an? (\w+)(, .*)", case)
        row = rows[f"{parts[1]} ({parts[2]}){parts[3]}" if parts else case]
        values = [row.get(column, 0.0) for column in columns]
        assert all(map(agree, cells, values)), (case, values)


def test_targets_of_serving_match_the_results():
    rows, found = results("layers", "pipeline", "conductor", "overload"), table("target | measured")
    assert len(found) == 9

    def check(begin, *figures):
        """Whether a row has these figures, in this order."""
        [cell] = [cells[0] for name, cells in found.items() if name.startswith(begin)]
        assert re.search(r"(?<![\d.,-])" + ".*?[^\\d.]".join(map(re.escape, figures)), cell), (
            figures
        )

    long, short = (rows[f"store, {held} of 2000 tokens, chunks of 128"] for held in (2000, 992))
    gains = [
        f"{row['us_cold'] / row['us_own']:.{digits}f}x" for row, digits in ((long, 1), (short, 2))
    ]
    check("a prefix hit", gains[0], f"{long['x_cold']:.1f}x", gains[1], f"{short['x_cold']:.2f}x")
    check("80 % of", f"{long['hidden']:.1f} %", f"{short['hidden']:.1f} %")
    ways = ("128, shm", "128, tcp", "512, tcp")
    handed = [rows[f"hand-off, 2000 tokens, chunks of {way}"] for way in ways]
    left = [f"{row['percent']:.1f} %" for row in handed]
    check("a hand-off", *left, *(f"{row['percent_by_chunks']:.1f}" for row in handed))
    piped = rows["1,024 tokens"]
    least = min(piped[f"{name}_quartiles"][0] for name in ("x_alone", "x_alone512"))
    check("a pipeline", *(f"{x:.2f}x" for x in (piped["x_alone"], piped["x_alone512"], least)))
    kinds = ("all lengths", "4 lengths", "4 lengths, 20,000 in flight")
    decided = [rows[f"decide, 1,000 instances, {kind}"]["us"] / 1e3 for kind in kinds]
    check("a decision", *(f"{ms:.2f} ms" for ms in decided))
    rules = [rows[rule] for rule in ("with prediction", "early rejection", "baseline")]

    def told(key):
        return ", ".join(str(row[key]) for row in rules)

    check("under overload", f"{told('wasted_prefills')} of {rules[0]['requests']} requests")
    check("the simulator", told("simulated_wasted_prefills"), told("simulated_good"), told("good"))
