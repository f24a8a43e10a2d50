"""The benches themselves: what they are built from, which options they have, where results go."""

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bench(monkeypatch):
    """Import a module of bench/ as a bench does: ``lib.harness``, or a bench by its name."""
    for folder in ("kernels", "transfer", "store", "serving", ""):
        monkeypatch.syspath_prepend(str(ROOT / "bench" / folder))
    for file in (ROOT / "bench").rglob("*.py"):
        package = file.parent.name
        for name in (package, f"{package}.{file.stem}", file.stem):
            monkeypatch.setitem(sys.modules, name, None)
            del sys.modules[name]  # and what was there is there again after the test
    return importlib.import_module


def test_latency_program_links_everything_it_includes(bench):
    compiled = bench("bench_latency").sources()
    left, seen = list(compiled), set()
    while left:
        file = left.pop()
        for name in re.findall(r'^#include "([^"]+)"', file.read_text(), re.MULTILINE):
            header = ROOT / "csrc" / name
            if header.exists() and header not in seen:
                seen.add(header)
                left.append(header)
    needed = {header.with_suffix(".cc") for header in seen}
    missing = {file for file in needed if file.exists()} - set(compiled)
    assert len(seen) > 50 and not missing


def test_several_transfer_sizes_are_one_run(bench, monkeypatch):
    words = ["--block-size", "4096", "16384", "--batch-size", "8", "64"]
    monkeypatch.setattr(sys, "argv", ["bench_transfer.py", *words])
    transfer = bench("bench_transfer")
    options = bench("lib.harness").arguments(None, transfer.add_options)
    assert transfer.chosen(options) == [(4096, 8), (4096, 64), (16384, 8), (16384, 64)]


@pytest.mark.parametrize("words", ["--operation wirte", "--without mooncak", "--block-size 0"])
def test_unknown_transfer_options_are_rejected(bench, monkeypatch, capsys, words):
    option, value = words.split()
    monkeypatch.setattr(sys, "argv", ["bench_transfer.py", option, value])
    with pytest.raises(SystemExit):
        bench("lib.harness").arguments(None, bench("bench_transfer").add_options)
    error = capsys.readouterr().err.splitlines()[-1]
    assert option in error and value in error


@pytest.fixture
def transfer(tmp_path):
    """Run bench_transfer.py over shm, and return its results."""
    (tmp_path / "mooncake").mkdir()  # a wheel that does not work here
    (tmp_path / "mooncake/engine.py").write_text("raise RuntimeError('no such driver')")

    def run(words):
        results, paths = tmp_path / "results.jsonl", [str(tmp_path), *sys.path]
        command = [sys.executable, ROOT / "bench/transfer/bench_transfer.py", "--json", results]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        options = ["--quick", "--repeat", "1", "--transports", "shm", "--operation", "write"]
        subprocess.run([*command, *options, *words.split()], env=environment, check=True)
        head, *rows = map(json.loads, results.read_text().splitlines())
        assert head["bench"] == "transfer"
        return rows

    return run


def test_transfer_row_moves_the_bytes_it_reports(transfer):
    sizes = f"512 2048 {200 << 20}"
    results = transfer(f"--without mooncake nixl-cma --batch-size 4 --block-size {sizes}")
    cases = ["shm write, 4 x 512 bytes", "shm write, 4 x 2 KiB"]
    *rows, left = results
    assert [row["case"] for row in rows] == cases
    assert left["case"] == "shm write, 4 x 204800 KiB" and "268435456 bytes" in left["left_out"]


def test_crashing_library_is_left_out(transfer):
    results = transfer("--without nixl-cma --batch-size 4 --block-size 4096")
    assert "shm write, 4 x 4 KiB" in [row["case"] for row in results]
    assert {"case": "mooncake", "left_out": "a process of mooncake has ended"} in results


def test_results_are_read_as_they_were_written(bench, tmp_path):
    results, file = bench("lib.results"), tmp_path / "results.jsonl"
    written = results.Results(
        {"bench": "x"}, [{"case": "a", "us": 1.5}], [{"case": "b", "left_out": "no"}]
    )
    results.write(file, written)
    assert results.read(file) == written and len(file.read_text().splitlines()) == 3
    file.write_text("")
    with pytest.raises(ValueError, match="must be results, got an empty file"):
        results.read(file)


@pytest.mark.parametrize("words", [["--json", "/a/b.json"], ["--json=/a/b.json"]])
def test_results_record_the_command(bench, monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["/a/bench_x.py", "--repeat", "9", *words, "--quick"])
    assert bench("lib.machine").describe("cpu", 1)["command"] == "bench_x.py --repeat 9 --quick"


@pytest.fixture
def tree(tmp_path, bench, monkeypatch):
    """The module `machine` in a repository of one commit, with results and with code."""
    if shutil.which("git") is None:
        pytest.skip("there is no git (apt install git)")
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)  # of a hook that runs the tests: git would use its repository
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_NOSYSTEM", "1")
    machine = bench("lib.machine")
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine, "KEPT", tmp_path / "bench/results")
    machine.KEPT.mkdir(parents=True)
    for file in (machine.KEPT / "a.json", tmp_path / "code"):
        file.write_text("1")
    machine.git("init", "-q")
    machine.git("add", ".")
    machine.git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a")
    return machine


@pytest.fixture
def hooked(tmp_path_factory, monkeypatch):
    """The repository whose hook runs the tests, with settings that no commit survives."""
    folder = tmp_path_factory.mktemp("hooked") / ".git"
    monkeypatch.setenv("GIT_DIR", str(folder))
    for name, value in {"COUNT": "1", "KEY_0": "commit.gpgsign", "VALUE_0": "true"}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{name}", value)
    return folder


def test_commit_lookup_runs_no_git_hooks(hooked, tree):
    assert not hooked.exists() and re.fullmatch("[0-9a-f]{7,}", tree.commit())


def test_results_of_uncommitted_code_are_not_kept(tree, tmp_path):
    clean = tree.commit()
    assert re.fullmatch("[0-9a-f]{7,}", clean) and tree.why_not_kept(tree.KEPT / "b.json") is None
    (tree.KEPT / "a.json").write_text("2")  # what a bench before this one has written
    assert tree.commit() == clean and tree.why_not_kept(tree.KEPT / "b.json") is None
    (tmp_path / "code").write_text("2")
    assert tree.commit() == f"{clean}-dirty" and "uncommitted" in tree.why_not_kept(tree.KEPT / "b")
    assert tree.why_not_kept(tmp_path / "b.json") is None


def test_results_without_git_have_no_commit(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert bench("lib.machine").commit() == "none"


def test_machines_that_a_hypervisor_calls_the_same_are_distinguished(bench, monkeypatch):
    machine = bench("lib.machine")
    one = "processor : 0\ncpu family : {}\nmodel : 1\nmodel name : AMD EPYC\nflags : fpu avx2{}\n\n"
    for family, more, expected in (
        (25, "", "AMD EPYC (cpu family 25, model 1, AVX2)"),
        (26, " avx512f", "AMD EPYC (cpu family 26, model 1, AVX-512)"),
    ):
        monkeypatch.setattr(machine.Path, "read_text", lambda _, f=family, m=more: one.format(f, m))
        assert machine.cpu_name() == expected
    monkeypatch.setattr(machine.Path, "read_text", lambda _: "processor : 0\n")  # as on Arm
    assert machine.cpu_name() == machine.platform.machine()


def test_json_option_explains_why_results_are_not_kept(tree, bench, tmp_path, monkeypatch, capsys):
    (tmp_path / "code").write_text("2")
    monkeypatch.setattr(sys, "argv", ["bench_x.py", "--json", str(tree.KEPT / "b.json")])
    with pytest.raises(SystemExit):
        bench("lib.harness").arguments(None)
    assert "--json: results are kept in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "told"),
    [("--repeat=0", "must be at least 1, got 0"), ("--threads=0", "must be at least 1, got 0"),
     ("--threads=x", "invalid int value: 'x'"), ("--seconds=nan", "must be at least 0, got nan"),
     ("--device=cuda:1", "invalid choice: 'cuda:1'"), ("--device=cuda", "finds no GPU, got cuda"),
     ("--json=none/b.json", "a folder that exists, got none/b.json"), ("--json=.", "got .")],
)  # fmt: skip
def test_bad_options_are_rejected_before_measuring(
    bench, monkeypatch, capsys, tmp_path, option, told
):
    harness = bench("lib.harness")
    monkeypatch.setattr(harness.torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench_x.py", option])
    with pytest.raises(SystemExit):
        harness.arguments(None)
    error = capsys.readouterr().err.splitlines()[-1]
    assert option.partition("=")[0] in error and told in error


@pytest.mark.parametrize(
    ("name", "words", "told"),
    [("bench_latency", "--sizes 1048577", "must be 1 to 1048576, got 1048577"),
     ("bench_latency", "--requests 0", "must be at least 1, got 0"),
     ("bench_file", "--folder none", "must be a folder that exists, got none"),
     ("bench_store_ssd", "--mib 15", "must be at least 16, got 15"),
     ("bench_kv_shapes", "--runs 0", "must be at least 1, got 0"),
     ("bench_kv_shapes", "--max-sms -1", "must be at least 0, got -1"),
     ("bench_kv_shapes", "--max-gib 0", "must be at least 0.001, got 0")],
)  # fmt: skip
def test_bad_bench_specific_options_are_rejected(bench, monkeypatch, capsys, name, words, told):
    monkeypatch.setattr(sys, "argv", [name, *words.split()])
    with pytest.raises(SystemExit):
        bench("lib.harness").arguments(None, bench(name).add_options)
    assert f"argument {words.split()[0]}: {told}" in capsys.readouterr().err


def test_directions_depend_on_the_device(bench):
    directions, options = bench("lib.kv_options").directions, argparse.Namespace(device="cpu")
    for options.direction in (None, ["H2H"]):
        assert directions(options) == ["H2H"]
    options.direction = ["H2H", "D2H"]
    with pytest.raises(SystemExit, match="must be of H2H on cpu, got D2H"):
        directions(options)


def test_request_that_is_late_slow_or_failed_misses_the_objectives(bench):
    goodput = bench("bench_goodput")
    told = {
        "duration": 10.0,
        "ttfts": [1.0, 1.1, 1.0, 1.0, 1.0, 0.0],
        "latencies": [1.2, 1.3, 1.4, 1.0, 1.2, 0.0],
        "output_lens": [3, 3, 3, 1, 3, 0],
        "itls": [[0.1, 0.1], [0.1, 0.1], [0.2, 0.2], [], [0.01, 0.19], []],
        "errors": ["", "", "", "", "", "ReadTimeout"],
    }
    run, objectives = goodput.Run.of(told), goodput.Objectives(ttft_s=1.05, tbt_s=0.11)
    assert run.num_within(objectives) == 3  # the second is late, the third slow
    assert run.num_within(objectives, by_p90=True) == 2  # and the fifth stalls
    row = goodput.row_of("apart", 0.6, [run, run], objectives)
    assert (row["requests"], row["completed"], row["within"]) == (12, 10, 0.5)
    assert row["within_rounds"] == [0.5, 0.5] and row["good_per_s_within"] == pytest.approx(0.3)
    assert row["ttft_p50_ms"] == pytest.approx(1000)


def test_goodput_is_the_last_rate_before_one_that_does_not_hold(bench):
    rows = [{"rate": rate, "within": share} for rate, share in ((1, 0.9), (2, 0.89), (3, 1.0))]
    goodput = bench("bench_goodput").goodput
    assert goodput(rows, "within") == 1 and goodput(rows[1:], "within") == 0
    assert goodput(rows[:1], "within") == 1 and goodput([], "within") == 0


def test_missing_perftest_is_reported(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="ib_write_bw is not installed: apt-get install perftest"):
        bench("baselines.perftest").gb_per_s("write", ["a", "b"], 4096, 1)


def test_bench_may_omit_common_options(bench, monkeypatch, capsys):
    arguments = bench("lib.harness").arguments
    monkeypatch.setattr(sys, "argv", ["bench_x.py"])
    assert arguments(None, without=("device", "seconds")).device == "cpu"
    for option in ("--device=cpu", "--seconds=1"):
        monkeypatch.setattr(sys, "argv", ["bench_x.py", option])
        arguments(None)
        with pytest.raises(SystemExit):
            arguments(None, without=("device", "seconds"))
        assert f"unrecognized arguments: {option}" in capsys.readouterr().err


def test_rounds_of_perftest_are_as_many_as_asked_for(bench, monkeypatch):
    perftest, arguments = bench("baselines.perftest"), bench("lib.harness").arguments
    for words, rounds in (([], 9), (["--repeat", "12"], 12), (["--quick"], 3)):
        monkeypatch.setattr(sys, "argv", ["bench_x.py", *words])
        options = arguments(None, perftest.few_rounds)
        assert len(perftest.in_turn(lambda: 1.0, lambda: 2.0, options)) == rounds


@pytest.mark.parametrize("form", [["--json", "{}"], ["--json={}"]])
def test_guest_results_are_copied_to_the_host(bench, monkeypatch, tmp_path, form):
    in_guest = bench("lib.in_guest")
    runner = tmp_path / "runner"  # the last word is the file for the results
    runner.write_text('#!/bin/bash\n[ "$1" = --prepare ] || echo "$*" >"${@: -1}"\n')
    runner.chmod(0o755)
    monkeypatch.setattr(in_guest, "RUNNER", runner)
    monkeypatch.setattr(in_guest.mk.rdma, "devices", list)
    target = tmp_path / "results.jsonl"
    monkeypatch.setattr(
        sys, "argv", ["bench_x.py", *(word.format(target) for word in form), "--quick"]
    )
    with pytest.raises(SystemExit) as raised:
        in_guest.leave_unless_nics(bench("lib.harness").arguments(None), 2)
    assert raised.value.code == 0 and "bench_x.py" in target.read_text()
