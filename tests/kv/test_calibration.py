"""The calibration table: made, read, refused, and used by "auto"."""

import json
import logging
import os
import re
from types import SimpleNamespace

import pytest
import torch

import mooncake_kernels as mk
from mooncake_kernels import _library, config
from mooncake_kernels.__main__ import main
from mooncake_kernels.kv import calibrate, calibration, choose, two_hop
from mooncake_kernels.kv.layout import Selection
from mooncake_kernels.kv.view import BlockPlan

from .layouts import Sizes, make_view

HOST, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def unread():
    """Every test reads its table anew, and leaves the CPU as it was."""
    calibration.forget()
    yield
    calibration.forget()


def table(cells=(), stream_from_bytes=None, **machine):
    here = {"cpu": calibration.cpu_name(), "cores": os.cpu_count(), "gpu": None}
    keys = ("direction", "run_bytes", "num_runs", "gb_per_s")
    return {
        "format": 1,
        "machine": here | machine,
        "cells": [dict(zip(keys, cell, strict=True)) for cell in cells],
        "host": {"stream_from_bytes": stream_from_bytes},
    }


def parsed(*cells):
    return calibration.parse(json.dumps(table(cells)))


def test_nearest_cell_decides_among_usable_engines():
    made = parsed(
        ("h2d", 512, 16, {"cuda": 2, "copy_engine": 1}),
        ("h2d", 1 << 20, 16, {"cuda": 20, "copy_engine": 50, "two_hop": 30}),
        ("h2d", 1 << 20, 4096, {"two_hop": 55.5}),
        ("d2h", 1 << 20, 16, {"cuda": 60, "copy_engine": 50}),
    )
    everything = ("cuda", "copy_engine", "two_hop")
    assert made.best("h2d", 700, 10, everything) == "cuda"
    assert made.best("h2d", 100_000, 10, everything) == "copy_engine"
    assert made.best("h2d", 100_000, 10, ("cuda", "two_hop")) == "two_hop"
    assert made.best("h2d", 1 << 20, 4096, everything) == "two_hop"
    assert made.best("h2d", 1 << 20, 4096, ("cuda",)) == "cuda"  # of another cell
    assert made.best("d2h", 1, 1, everything) == "cuda"
    assert made.best("d2d", 1, 1, everything) is None
    assert made.best("h2d", 512, 16, ("tma",)) is None


MALFORMED = [
    ("", "Expecting value"),
    ("[]", "no calibration table"),
    ("{}", "no calibration table: KeyError"),
    (json.dumps({"format": 2}), "format must be 1, got 2"),
    (json.dumps(table([("x2y", 1, 1, {"cuda": 1})])), "a cell must have a direction"),
    (json.dumps(table([("d2d", 0, 1, {"cuda": 1})])), "a cell must have"),
    (json.dumps(table([("d2d", 1, 1, {"cuda": "fast"})])), "a cell must have"),
    (json.dumps(table([("d2d", 1, 1, {"cuda": float("nan")})])), "a cell must have"),
    (json.dumps(table([("d2d", 1, 1, None)])), "no calibration table: TypeError"),
    (json.dumps(table(stream_from_bytes=-1)), "stream_from_bytes must be an integer > 0, got -1"),
    (json.dumps(table() | {"machine": {}}), "machine must have"),
]


@pytest.mark.parametrize(("text", "reason"), MALFORMED)
def test_malformed_table_is_rejected(tmp_path, monkeypatch, caplog, text, reason):
    file = tmp_path / "table.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=reason):
        calibration.parse(text)
    with config.override(calibration=str(file)):  # named by the user
        with pytest.raises(ValueError, match=f"MOONCAKE_KERNELS_CALIBRATION must be .*{reason}"):
            mk.gather_blocks(make_view("nhd_per_layer", Sizes()), [0])
    monkeypatch.setattr(config.Settings, "calibration", str(file))  # where it is looked for anyway
    with config.override(calibration=str(file)):
        mk.gather_blocks(make_view("nhd_per_layer", Sizes()), [0])
        mk.gather_blocks(make_view("nhd_per_layer", Sizes()), [0])
    assert len([line for line in caplog.messages if "table.json is ignored" in line]) == 1


def test_missing_table_is_an_error_only_if_configured(tmp_path, monkeypatch, caplog):
    missing = str(tmp_path / "none.json")
    with config.override(calibration=missing):
        with pytest.raises(ValueError, match="got '.*none.json': no such file"):
            calibration.current()
    monkeypatch.setattr(config.Settings, "calibration", missing)
    with config.override(calibration=missing):
        assert calibration.current() is None
    assert not caplog.messages


def test_table_of_another_machine_is_ignored(tmp_path, caplog):
    file = tmp_path / "table.json"
    file.write_text(json.dumps(table(stream_from_bytes=77, cpu="another")))
    with config.override(calibration=str(file)):
        assert calibration.current() is None
    assert "is ignored: it is of {'cpu': 'another'" in caplog.text
    made = parsed()
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
            assert not calibration.is_of_gpu(made, 0)
    assert caplog.text.count("ignored for cuda:0, a a GPU, for it is of no GPU") == 1


def test_streaming_threshold_of_the_table_is_applied(tmp_path):
    file = tmp_path / "table.json"
    file.write_text(json.dumps(table(stream_from_bytes=12345)))
    before = _library.set_stream_from_bytes(0)
    view = make_view("nhd_per_layer", Sizes(), dtype=torch.int16)
    with config.override(calibration=str(file)):
        mk.gather_blocks(view, [0], engine="host")  # a named engine skips the table
        assert _library.set_stream_from_bytes(0) == before
        packed = mk.gather_blocks(view, [1, 2])
        assert _library.set_stream_from_bytes(12345) == 12345
        assert torch.equal(packed[1, 2, 1], view.plane(2, 1)[2].transpose(0, 1))
    calibration.forget()
    assert _library.set_stream_from_bytes(0) == before
    with pytest.raises(mk.InvalidArgument, match="num_bytes must be 0 or more, got -1"):
        _library.call(_library.set_stream_from_bytes, -1)


def block_plan(dim=8192):
    """Of rows that are long, and aligned for bulk copies if dim is."""
    sizes = Sizes(token=2, head=3, dim=dim, block=3)
    view, host = (make_view(name, sizes) for name in ("nhd_per_layer", "block_first_nhd"))
    return BlockPlan(view.layout, host.layout, view.everything)


@pytest.fixture
def chosen(monkeypatch):
    """What choose() makes of sides on these devices, by a table in which later engines win."""
    order = ("cuda", "tma", "copy_engine", "two_hop")
    cells = [
        (direction, 4096, 16, {name: i + 1 for i, name in enumerate(order)})
        for direction in ("d2d", "h2d", "d2h")
    ]
    made = parsed(*cells)
    monkeypatch.setattr(calibration, "_current", made)
    monkeypatch.setattr(calibration, "is_of_gpu", lambda table, index: True)
    monkeypatch.setattr(choose, "_takes_lists", lambda device: True)
    monkeypatch.setattr(_library, "has_cuda", True)

    aligned = [torch.empty(8)]

    def run(src, dst, *ids, plan=None, engine="auto", tensors=aligned):
        sides = (SimpleNamespace(device=device, tensors=tensors) for device in (src, dst))
        return choose.choose(engine, *sides, [plan or block_plan()], ids)

    return run


def test_auto_picks_the_fastest_engine_that_takes_the_call(chosen, monkeypatch, caplog):
    _library._logged.clear()
    ids = torch.tensor([0, 1])
    with caplog.at_level(logging.INFO, logger="mooncake_kernels"):
        for _ in range(2):
            assert chosen(GPU, HOST, ids, [1, 2]) == "two_hop"
    assert caplog.messages == ["engine auto: two_hop for d2h copies by the calibration"]
    assert chosen(HOST, GPU, ids, [1, 2], engine="cuda") == "cuda"
    assert chosen(GPU, GPU, ids, [1, 2]) == "copy_engine"  # there is no host to hop to
    assert chosen(HOST, HOST, ids, [1, 2]) == "auto"
    assert chosen(GPU, HOST, [], []) == "auto"
    assert chosen(GPU, HOST, None) == "auto"  # to be refused by who looks at them
    assert chosen(GPU, HOST, ids, plan=object()) == "auto"  # by rows
    monkeypatch.setattr(choose, "_are_on_host", lambda ids: False)
    assert chosen(GPU, HOST, ids) == "tma"
    odd = torch.empty(64, dtype=torch.uint8)[1:]
    assert chosen(GPU, HOST, ids, tensors=[odd]) == "cuda"
    assert chosen(GPU, HOST, ids, plan=block_plan(dim=8191)) == "cuda"
    monkeypatch.setattr(choose, "_are_on_host", lambda ids: True)
    monkeypatch.setattr(choose, "_takes_lists", lambda device: False)
    assert chosen(GPU, HOST, ids) == "tma"


def test_two_hops_are_not_chosen_where_they_would_be_rejected(chosen):
    small = make_view("nhd_per_layer", Sizes())
    plan = BlockPlan(small.layout, small.layout, small.everything)
    assert not two_hop.takes(plan, True)
    assert chosen(GPU, HOST, [0], plan=plan) == "copy_engine"
    slots = Selection([(0, 0)], 2, 0, 0, 4, by_slot=True)
    large = block_plan()
    assert two_hop.takes(large, True)
    assert not two_hop.takes(BlockPlan(*large.layouts, slots), True)


def test_quick_calibration_writes_a_readable_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "QUICK_RUN_BYTES", (256, 4096))
    monkeypatch.setattr(calibrate, "QUICK_NUM_RUNS", (4, 16))
    monkeypatch.setattr(calibrate, "STREAMED_SHIFTS", {True: range(14, 16)})
    file = tmp_path / "folder/table.json"
    assert main(["calibrate", "--quick", "--json", str(file)]) == 0
    assert f"written to {file}" in capsys.readouterr().out
    made = calibration.parse(file.read_text())
    assert {cell.direction for cell in made.cells} == set(calibrate.directions())
    h2h = [cell for cell in made.cells if cell.direction == "h2h"]
    assert [(c.run_bytes, c.num_runs) for c in h2h] == [
        (256, 4), (256, 16), (4096, 4), (4096, 16)
    ]  # fmt: skip
    assert all(list(cell.gb_per_s) == ["host"] for cell in h2h)
    assert [*file.parent.iterdir()] == [file]
    with config.override(calibration=str(file)):
        assert calibration.current() is not None
    assert torch.get_num_threads() == 2


def not_reached(**options):
    raise AssertionError("it measures")


@pytest.mark.parametrize(
    "path, reason",
    [
        ("/proc/nope.json", r"error: \[Errno 2\] No such file or directory: '/proc/nope.json'\n"),
        ("/proc", "error: calibrate: the table must be written to a file, got /proc\n"),
        ("/dev/null", "error: calibrate: the table must be written to a file, got /dev/null\n"),
    ],
)
def test_unwritable_path_is_reported_before_measuring(path, reason, monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "measure", not_reached)
    assert main(["calibrate", "--json", path]) == 2
    assert re.fullmatch(reason, capsys.readouterr().err)


def test_failed_calibration_keeps_the_existing_table(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "measure", not_reached)
    file = tmp_path / "table.json"
    file.write_text("before")
    with pytest.raises(AssertionError, match="it measures"):
        main(["calibrate", "--json", str(file)])
    assert file.read_text() == "before" and [*tmp_path.iterdir()] == [file]


def test_calibrate_requires_a_path_if_auto_has_no_table(monkeypatch, capsys):
    monkeypatch.setattr(calibrate, "measure", not_reached)
    with config.override(calibration=""), pytest.raises(SystemExit, match="2"):
        main(["calibrate"])
    message = (
        '--json must be given where "auto" has no table: MOONCAKE_KERNELS_CALIBRATION is empty'
    )
    assert message in capsys.readouterr().err


def test_smallest_streaming_size_that_pays_off():
    def found(*ratios):
        rows = [{"num_bytes": 1 << i, "ratio": ratio} for i, ratio in enumerate(ratios)]
        return calibrate.smallest_that_pays(rows)

    assert found(0.5, 0.9, 1.0, 2.0) == 4
    assert found(2.0, 0.9, 1.1, 1.2) == 4  # a size alone is noise
    assert found(1.1, 1.1) == 1
    assert found(0.9, 0.8) is None
