"""The command line: what it prints, and what it says of bad input."""

import json
from pathlib import Path

import pytest

from mooncake_serving.simulator.__main__ import main
from mooncake_serving.simulator.reproductions import REPRODUCTIONS
from mooncake_serving.simulator.traces import TraceProfile, synth_trace, write_mooncake

PROFILE = Path(__file__).parent / "conversation.profile.json"


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
    assert stopped.value.code == 0 and "usage: python -m mooncake_serving.simulator" in text
    if not command:
        assert all(name in text for name in REPRODUCTIONS)


def test_hit_rate_prints_one_json_line_a_capacity(trace, capsys):
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
def test_a_bad_line_is_named_by_its_number(command, line, message, tmp_path, capsys):
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    assert main([*command, "--trace", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and f"bad.jsonl, {message}" in error


@pytest.mark.parametrize("text", ["-1", "nan", "many"])
def test_a_capacity_that_is_none_is_named(text, trace, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["hit-rate", "--trace", trace, f"--capacity={text}"])
    assert stopped.value.code == 2
    assert f"must be a number of tokens, or inf, got '{text}'" in capsys.readouterr().err


def test_an_empty_trace_and_a_missing_one_are_errors(tmp_path, capsys):
    path = tmp_path / "empty.jsonl"
    path.touch()
    assert main(["hit-rate", "--trace", str(path), "--capacity", "inf"]) == 2
    assert "a trace must hold at least one request" in capsys.readouterr().err
    assert main(["hit-rate", "--trace", str(tmp_path / "none"), "--capacity", "inf"]) == 2
    assert "No such file" in capsys.readouterr().err


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
        (["--dram", "-5"], "dram_tokens must be at least 0, got -5"),
        (["--event-delay", "-1"], "event_delay_s must be at least 0, got -1.0"),
        (["--fail", "1", "-3", "1"], "failures must begin and last"),
        (
            ["--decode-s", "-3"],
            "--decode-s must come with --admission predictive, got --admission all",
        ),
        (["--decode-s", "-3", "--admission", "predictive"], "decode_s must be positive, got -3.0"),
    ],
)
def test_an_impossible_cluster_is_named(arguments, message, trace, capsys):
    assert main(["run", "--trace", trace, "--json", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_trace_tools(trace, tmp_path, capsys):
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


def test_a_reproduction_prints_lines_and_saves_a_plot(tmp_path, capsys):
    assert main(["sarathi-tiles", "--json", "--out", str(tmp_path)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"128 tokens", "256 tokens", "257 tokens"} <= {line.get("what") for line in lines}
    kept = (tmp_path / "sarathi-tiles.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in kept] == lines
    assert (tmp_path / "sarathi-tiles.png").read_bytes().startswith(b"\x89PNG")


def test_a_reproduction_shows_a_table(capsys):
    assert main(["fast25-fig9", "--profile", str(PROFILE), "--requests", "60"]) == 0
    text = capsys.readouterr().out
    assert "published" in text and "hit rate without a limit" in text and "nothing beats" in text
