"""The command line: its output, and its messages for bad input."""

import importlib
import json
import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import mooncake_simulator as simulator
from mooncake_serving import conductor
from mooncake_serving.conductor import InvalidArgument
from mooncake_simulator import Disaggregated, DisaggregatedOptions, fit_costs
from mooncake_simulator.__main__ import main
from mooncake_simulator.commands import per_request
from mooncake_simulator.commands.view import View
from mooncake_simulator.machines import A6000, LLAMA_13B, MACHINES
from mooncake_simulator.reproductions import REPRODUCTIONS, Curve
from mooncake_simulator.traces import TraceProfile, synth_trace, write_mooncake

PROFILE = Path(__file__).parent / "conversation.profile.json"
SYNTHETIC = ["--synthetic-profile", str(PROFILE.parent / "synthetic.profile.json")]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("traces") / "small.jsonl"
    write_mooncake(synth_trace(TraceProfile.load(PROFILE), 120, seed=1), path)
    return str(path)


COMMANDS = ["hit-rate", "run", "trace stats", "trace scale", "trace synth", *REPRODUCTIONS]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_a_help(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and "usage: python -m mooncake_simulator" in text
    if not command:
        assert all(name in text for name in REPRODUCTIONS)


def test_hit_rate_prints_one_json_line_per_capacity(trace, capsys):
    capacities = ["0", "100000", "3e6", "inf"]
    assert main(["hit-rate", "--trace", trace, "--capacity", *capacities, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["capacity_tokens"] for line in lines] == [0, 100_000, 3_000_000, "inf"]
    rates = [line["hit_rate"] for line in lines]
    assert rates[0] == 0 and rates == sorted(rates) and rates[-1] > 0
    for line in lines:
        assert line["hit_rate"] == line["hit_tokens"] / line["input_tokens"]


def test_hit_rate_without_json_is_a_table(trace, capsys):
    assert main(["hit-rate", "--trace", trace, "--capacity", "inf", "--policy", "sieve"]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["capacity", "hit", "rate", "of", "input"]
    assert line.split()[0] == "inf"


def test_a_pipe_without_a_reader_is_an_error(tmp_path, capfd):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: pipe.open().close())
    reader.start()
    synth = ["trace", "synth", "--profile", str(PROFILE), "--requests", "2000"]
    assert main([*synth, str(pipe)]) == 2
    reader.join()
    assert capfd.readouterr().err == "error: [Errno 32] Broken pipe\n"


def test_command_runs_without_stdout(trace, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["trace", "stats", trace]) == 0
    sys.stdout.close()


GOOD = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2: "),
        (json.dumps(GOOD | {"timestamp": 1}), "line 2: timestamp must not be below 5, got 1"),
        (json.dumps(GOOD | {"hash_ids": [1]}), "line 2: hash_ids must be 2 for 600 tokens"),
        (json.dumps(GOOD | {"input_length": -1}), "line 2: input_length must be"),
    ],
)
@pytest.mark.parametrize("command", [["hit-rate", "--capacity", "inf"], ["run", "--json"]])
def test_bad_line_is_reported_with_its_number(command, line, message, tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    assert main([*command, "--trace", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and f"bad.jsonl, {message}" in error


@pytest.mark.parametrize(
    ("option", "texts", "message"),
    [
        ("--capacity", ["-1", "nan", "many"], "must be a number of tokens, or inf"),
        ("--block-tokens", ["0", "-1", "1.5", "x", "\u00b2"], "must be at least 1"),
    ],
)
def test_bad_numbers_are_rejected(option, texts, message, trace, capsys):
    for text in texts:
        with pytest.raises(SystemExit, match="2"):
            main(["hit-rate", "--trace", trace, "--capacity=1", f"{option}={text}"])
        assert f"{option}: {message}, got '{text}'" in capsys.readouterr().err


def test_a_run_that_serves_no_request_has_no_latencies(tmp_path, capsys):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps(GOOD | {"output_length": 10**9}) + "\n")
    assert main(["run", "--trace", str(path), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["served"], summary["ttft_mean_s"], summary["tbt_p99_s"]) == (0, None, None)
    assert main(["run", "--trace", str(path)]) == 0
    assert "None" not in capsys.readouterr().out


CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,374,44\n"


@pytest.mark.parametrize(
    ("command", "name", "content", "message"),
    [
        (["hit-rate", "--capacity", "inf"], "empty.jsonl", "", "must hold at least one request"),
        (["hit-rate", "--capacity", "inf"], "none", None, "No such file"),
        (["hit-rate", "--capacity", "inf"], "azure.csv", CSV, "got a CSV, which does not say what"),
        (
            ["fast25-fig9", *SYNTHETIC],
            "azure.csv",
            CSV,
            "must hold requests that share prefixes, got 1 that share none: azure.csv",
        ),
    ],
)
def test_unusable_traces_are_errors(command, name, content, message, tmp_path, capsys):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    assert main([*command, "--trace", str(path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run --trace", "trace scale", "fast25-fig9 --trace"])
def test_bad_seed_is_rejected(command, trace, tmp_path, capsys):
    out = [str(tmp_path / "out.jsonl")] if command == "trace scale" else []
    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), trace, *out, "--seed", "-1"])
    assert stopped.value.code == 2
    assert "argument --seed: must be an integer of at least 0, got '-1'" in capsys.readouterr().err


def test_a_load_that_leaves_no_request_writes_no_trace(trace, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert main(["trace", "scale", trace, str(out), "--load", "1e-8"]) == 2
    error = capsys.readouterr().err
    assert "--load must leave at least one of 120 requests, got 1e-08" in error
    assert not out.exists()


def test_run_prints_a_summary(trace, capsys):
    arguments = ["run", "--trace", trace, "--prefill", "2", "--decode", "1", "--json"]
    assert main([*arguments, "--fail", "0", "3", "5", "--speed", "2", "--ssd", "1000000"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["requests"] == summary["served"] == 120 and summary["rejected"] == 0
    assert 0 < summary["ttft_p50_s"] <= summary["ttft_p90_s"] <= summary["ttft_p99_s"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--decode", "0"], "num_decode must be at least 1"),
        (["--prefill", "0"], "num_prefill must be at least 1"),
        (["--gbps", "0"], "--gbps must be > 0, got 0.0"),
        (["--fail", "99", "0", "1"], "failures must be of instances 0 to 15"),
        (["--tbt", "-1"], "tbt_s must be positive, got -1.0"),
        (["--chunk", "0"], "chunk_tokens must be at least 1, got 0"),
        (["--group", "0"], "group_size must be at least 1, got 0"),
        (["--group", "81"], "at most 80, the layers of LLaMA3-70B, got 81"),
        (["--dram", "-5"], "dram_tokens must be at least 0, got -5"),
        (["--event-delay", "-1"], "event_delay_s must be at least 0, got -1.0"),
        (["--fail", "1", "-3", "1"], "Failure: at_s must be at least 0, got -3.0"),
        (["--machine", "A6000"], "model must fit into 43 GB of A6000, got LLaMA3-70B with 141 GB"),
        (
            ["--machine", "A6000", "--model", "LLaMA-13B"],
            "--gbps must be given with --machine A6000, got none",
        ),
        (
            ["--machine", "A6000", "--model", "LLaMA-13B", "--gbps", "100"],
            "--dram must be given with --machine A6000, got none",
        ),
        (["--machine", "A6000", "--coupled", "plain"], "model must fit into 43 GB of A6000"),
        (["--max-batch-size", "0"], "max_batch_size must be at least 1, got 0"),
        (["--coupled", "plain", "--ssd", "5"], "--ssd must be left out with --coupled, got 5"),
        (["--coupled", "plain", "--policy", "local-cache-aware"], "--policy must be one of random"),
        (["--coupled", "plain", "--decode", "-1"], "--decode must be at least 0, got -1"),
        (["--decode-s", "5"], "--decode-s must be given with --admission predictive, got all"),
        (["--admission", "predictive", "--decode-s", "-3"], "decode_s must be positive, got -3.0"),
    ],
)
def test_impossible_cluster_is_rejected(arguments, message, trace, capsys):
    assert main(["run", "--trace", trace, "--json", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_run_saves_a_line_for_each_request_and_a_plot(trace, tmp_path, capsys):
    arguments = ["run", "--trace", trace, "--prefill", "2", "--decode", "1", "--json"]
    assert main([*arguments, "--admission", "early", "--ttft", "2", "--out", str(tmp_path)]) == 0
    summary = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["request"] for line in lines] == list(range(120))
    served = [line for line in lines if line["served"]]
    refused = [line for line in lines if not line["served"]]
    assert (len(served), len(refused)) == (summary["served"], summary["rejected"])
    assert served and refused
    for line in served:
        assert line["decision"] == "ACCEPTED" and line["reason"].startswith("TTFT ")
        assert line["prefill_instance"] in (0, 1) and line["decode_instance"] == 2
        assert 0 <= line["hit_tokens"] <= line["input_length"]
        assert line["arrival_s"] + line["ttft_s"] <= line["finished_s"]
    for line in refused:
        assert line["decision"] == "PREFILL_LOAD" and "of its objective, over" in line["reason"]
        assert line["ttft_s"] is line["tbt_s"] is line["finished_s"] is None
    ttft = [line["ttft_s"] for line in served]
    assert sum(ttft) / len(ttft) == pytest.approx(summary["ttft_mean_s"])
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_load_over_time_counts_active_requests():
    assert per_request._load("any", [(0.0, 2.0), (1.0, 4.0)]) == Curve(
        "any", [0.0, 1.0, 2.0, 4.0], [1, 2, 1, 0]
    )
    assert per_request._load("no one", []).y == []
    distribution = per_request._distribution("TBT", np.array([0.4, 0.0, 0.2]))
    assert distribution == Curve("TBT", [0.2, 0.4], [50.0, 100.0]), "0 is of one token: no TBT"


@pytest.mark.parametrize("mode", ["plain", "prefix-caching", "chunked-prefill"])
def test_run_on_coupled_instances(mode, trace, tmp_path, capsys):
    arguments = ["run", "--trace", trace, "--prefill", "1", "--decode", "2", "--json"]
    assert main([*arguments, "--coupled", mode, "--out", str(tmp_path)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["served"] == 120 and (summary["hit_rate"] > 0) == (mode == "prefix-caching")
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert {line["prefill_instance"] for line in lines} == {0, 1, 2}
    assert all(line["prefill_instance"] == line["decode_instance"] for line in lines)


@pytest.mark.parametrize("machine", MACHINES)
def test_run_on_coupled_instances_of_each_machine(machine, trace, capsys):
    arguments = ["--machine", machine, "--model", LLAMA_13B.name, "--prefill", "2", "--decode", "1"]
    assert main(["run", "--trace", trace, "--coupled", "plain", "--json", *arguments]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["served"] + summary["rejected"] == summary["requests"] == 120
    assert summary["served"] > 0 and summary["sent_bytes"] == 0


def test_transfer_without_a_network_never_ends():
    transfer = fit_costs(LLAMA_13B, A6000, 4096).transfer
    assert transfer.seconds([0, 1, 10**6], 0.0, 0).tolist() == [0.0, np.inf, np.inf]


def test_run_takes_models_and_machines_by_name(trace, capsys):
    gpu_s = []
    for model in ("LLaMA2-7B", "LLaMA2-13B"):
        assert main(["run", "--trace", trace, "--json", "--model", model]) == 0
        gpu_s.append(json.loads(capsys.readouterr().out)["prefill_gpu_s"])
    assert gpu_s[0] < gpu_s[1]
    one_gpu = ["--machine", "A6000", "--model", "LLaMA-13B", "--gbps", "100", "--dram", "20000"]
    assert main(["run", "--trace", trace, "--json", *one_gpu]) == 0


def test_disaggregation_requires_a_network():
    with pytest.raises(
        InvalidArgument, match=r"machine.nic_bytes_per_s must be positive, got 0\.0"
    ):
        DisaggregatedOptions(model=LLAMA_13B, machine=A6000)


def test_conductor_model_is_rejected_as_a_simulator_model():
    with pytest.raises(
        InvalidArgument, match=r"model must be a Model of .*machines, got ModelSpec"
    ):
        DisaggregatedOptions(model=conductor.LLAMA3_70B)


@pytest.mark.parametrize("command", ["sarathi-tiles", "fast25-fig9", "run"])
def test_output_folder_is_checked_before_simulating(command, trace, monkeypatch, capsys):
    def never(*_, **__):
        raise AssertionError("nothing is to be simulated")

    if command != "run":
        monkeypatch.setitem(REPRODUCTIONS, command, never)
    monkeypatch.setattr(Disaggregated, "run", never)
    source = [] if command == "sarathi-tiles" else ["--trace", trace]
    source += SYNTHETIC if command == "fast25-fig9" else []
    assert main([command, *source, "--out", "/dev/null/x"]) == 2
    assert "/dev/null/x" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "mooncake_simulator.plot", raising=False)
    monkeypatch.delattr(simulator, "plot", raising=False)
    assert main([command, *source, "--out", "results"]) == 1
    assert "matplotlib is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("num_parts, total", [(0, None), (8, 8), (12_031, 12_031)])
def test_the_bar_shows_the_parts_that_are_reported(num_parts, total):
    view = View()
    view.step("any", 1, num_parts)
    for _ in range(num_parts):
        view.advance()
    (task,) = view._progress.tasks
    assert task.total == total and task.completed > 0.99 * num_parts - 1


@pytest.mark.parametrize("command", ["run", "sarathi-tiles"])
def test_json_output_needs_no_plotting_package(command, trace, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    for name in ("rich.console", "rich.progress", "rich.table"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "mooncake_simulator.commands.view")
    source = [] if command == "sarathi-tiles" else ["--trace", trace]
    assert main([command, *source, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])
    assert main([command, *source]) == 1
    assert "rich is not installed: pip install 'mooncake-kernels[simulator]'" in (
        capsys.readouterr().err
    )


def test_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "mooncake_simulator.plot", raising=False)
    monkeypatch.delattr(simulator, "plot", raising=False)
    with pytest.raises(
        ModuleNotFoundError, match=r"matplotlib is .*kernels\[simulator\]'$"
    ) as told:
        importlib.import_module("mooncake_simulator.plot")
    assert told.value.name == "matplotlib"


def test_trace_tool_commands(trace, tmp_path, capsys):
    out, profile = str(tmp_path / "out.jsonl"), str(tmp_path / "profile.json")
    assert main(["trace", "stats", trace, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
    assert main(["trace", "scale", trace, out, "--load", "2"]) == 0
    assert len(Path(out).read_text().splitlines()) == 240
    synth = ["trace", "synth", "--like", trace, out, "--requests", "30"]
    assert main([*synth, "--save-profile", profile]) == 0
    first = Path(out).read_text()
    assert len(first.splitlines()) == 30
    assert main(["trace", "synth", "--profile", profile, out, "--requests", "30"]) == 0
    assert Path(out).read_text() == first
    capsys.readouterr()
    assert main(["trace", "synth", "--like", trace]) == 2
    assert "OUT or --save-profile must be given" in capsys.readouterr().err


def test_reproduction_prints_json_lines_and_saves_a_plot(tmp_path, capsys):
    assert main(["sarathi-tiles", "--json", "--out", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"128 tokens", "256 tokens", "257 tokens"} <= {line.get("what") for line in lines}
    kept = (tmp_path / "sarathi-tiles.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in kept] == lines
    assert (tmp_path / "sarathi-tiles.png").read_bytes().startswith(b"\x89PNG")


def test_reproduction_prints_a_table(capsys):
    made_up = ["--profile", str(PROFILE), "--requests", "60"]
    assert main(["fast25-fig9", *made_up, *SYNTHETIC]) == 0
    text = capsys.readouterr().out
    assert "published" in text and "without a limit" in text and "nothing beats" in text
