"""``python -m mooncake_serving demo``, as a user runs it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mooncake_serving.__main__ import main
from mooncake_serving.engine.disaggregated import WorkerFailed
from tests.progress import run_to_its_end, work_of

WAIT_S = 120  # longer than anything here takes, but the whole demo and its start


def demo(*arguments):
    words = [a if isinstance(a, bytes) else str(a) for a in arguments]
    command = [sys.executable, "-m", "mooncake_serving", "demo", *words]
    return run_to_its_end(command)


def test_json_has_answers_and_block_life_cycles(tiny_folder):
    result = demo("--model", tiny_folder, "--json", "--max-tokens", 8, "--prompt", "the end")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["identical"] is True
    [request] = answer["requests"]
    assert 1 <= len(request["token_ids"]) <= 8
    steps = {row["step"]: row for row in answer["life"]}
    assert steps["moved"]["bytes"] > 0


def test_terminal_shows_answers_and_the_block_table(tiny_folder):
    prompts = [word for prompt in ("one", "[/b] two", "three") for word in ("--prompt", prompt)]
    result = demo("--model", tiny_folder, "--max-tokens", 4, "--temperature", 1.0, *prompts)
    assert result.returncode == 0, result.stderr
    assert "The life of the KV blocks" in result.stdout
    assert "[/b] two" in result.stdout
    assert "All 3 answers have the same tokens" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere/model.gguf"], "'/nowhere/model.gguf', which does not exist"),
        (["--device", "tpu"], "--device must be cpu or cuda, got 'tpu'"),
        (["--device", "cpu:x"], "--device must be cpu or cuda, got 'cpu:x'"),
        (["--prompt", b"\xff\xfe"], "--prompt must be UTF-8 text"),
    ],
)
def test_bad_argument_gives_a_one_line_error(arguments, message, tiny_folder):
    model = [] if "--model" in arguments else ["--model", tiny_folder]
    result = demo(*model, *arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--max-tokens", "0", "must be an integer from 1 on, got '0'"),
        ("--chunk-tokens", "1.5", "must be an integer from 1 on, got '1.5'"),
        ("--seed", "-1", "must be an integer from 0 on, got '-1'"),
        ("--temperature", "inf", "must be a number from 0 on, got 'inf'"),
        ("--deadline", "nan", "must be at least 0.01, got 'nan'"),
        ("--deadline", "0", "must be at least 0.01, got '0'"),
        ("--transport", "udp", "invalid choice: 'udp'"),
        ("--transport", "local", "invalid choice: 'local'"),
    ],
)
def test_bad_option_is_rejected_before_anything_is_loaded(option, value, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["demo", option, value])
    assert ended.value.code == 2
    assert f"error: argument {option}: {message}" in capsys.readouterr().err


def test_runtime_failure_is_not_reported_as_a_difference(tiny_folder, capsys, monkeypatch):
    def run(options):
        raise WorkerFailed("the decode process was killed")

    monkeypatch.setattr("mooncake_serving.demo.run", run)
    assert main(["demo", "--model", str(tiny_folder)]) == 2
    assert capsys.readouterr().err == "error: the decode process was killed\n"


@pytest.mark.parametrize("package", ["rich", "tokenizers"])
def test_missing_package_gives_a_one_line_error(package, tiny_folder):
    """As after `pip install .` without the extra."""
    code = f"""
import sys
sys.modules[{package!r}] = None
from mooncake_serving.__main__ import main
sys.exit(main(["demo", "--model", {str(tiny_folder)!r}]))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == (
        f"error: {package} is not installed: pip install 'mooncake-kernels[demo]'\n"
    )


def test_interrupt_exits_without_a_traceback(tiny_folder):
    command = [sys.executable, "-m", "mooncake_serving", "demo", "--model", str(tiny_folder)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as a terminal's
    )
    eventually(
        lambda: len(workers_of(process.pid)) == 2 and hears_interrupts(process.pid),
        lambda: work_of(process.pid),
    )
    time.sleep(0.5)  # they are importing now
    pids = children_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130 and "Traceback" not in errors, errors
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def eventually(condition, progress=lambda: None):
    """Wait until it holds, as long as what ``progress`` returns changes now and then."""
    until, seen = time.monotonic() + WAIT_S, progress()
    while not condition():
        if (now := progress()) != seen:
            until, seen = time.monotonic() + WAIT_S, now
        assert time.monotonic() < until
        time.sleep(0.05)


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def workers_of(pid: int) -> list[str]:
    """Its children but the one that tracks what they share."""
    return [
        child
        for child in children_of(pid)
        if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def hears_interrupts(pid: int) -> bool:
    """Not while it starts a worker, which shall not hear them."""
    [caught] = re.findall(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught, 16) >> (signal.SIGINT - 1) & 1)
