"""The code of docs/conductor.md runs."""

import re
from pathlib import Path

from mooncake_simulator.traces import TraceProfile, read_trace, synth_trace, write_mooncake

ROOT = Path(__file__).parent.parent.parent
CONDUCTOR, TRACES = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs/conductor.md").read_text(), re.DOTALL
)


def run(code: str) -> dict:
    names: dict = {}
    exec(compile(code, "docs/conductor.md", "exec"), names)
    return names


def test_the_life_of_a_request(capsys):
    names = run(CONDUCTOR)
    assert names["decision"].accepted and names["later"].accepted and names["lost"] == []
    assert capsys.readouterr().out.startswith("request 1 is taken: TTFT 0.1")


def test_the_trace_tools(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    profile = TraceProfile.load(ROOT / "tests/simulator/conversation.profile.json")
    write_mooncake(synth_trace(profile, 300), tmp_path / "trace.jsonl")
    run(TRACES)
    assert "requests      300 in" in capsys.readouterr().out
    assert len(read_trace(tmp_path / "synth.jsonl")) == 1000
