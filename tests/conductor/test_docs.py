"""The code of docs/serving/conductor.md runs."""

from mooncake_simulator.traces import TraceProfile, read_trace, synth_trace, write_mooncake
from tests.pages import ROOT, run_block


def test_documented_request_life_cycle_runs(capsys):
    names = run_block("serving/conductor", 0, {})
    assert names["decision"].accepted and names["later"].accepted and names["lost"] == []
    assert capsys.readouterr().out.startswith("request 1 is taken: TTFT 0.1")


def test_documented_trace_tools_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    profile = TraceProfile.load(ROOT / "tests/simulator/conversation.profile.json")
    write_mooncake(synth_trace(profile, 300), tmp_path / "trace.jsonl")
    run_block("serving/conductor", 1, {})
    assert "requests      300 in" in capsys.readouterr().out
    assert len(read_trace(tmp_path / "synth.jsonl")) == 1000
