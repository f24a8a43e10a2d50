"""``python -m mooncake_kernels bandwidth``: a target process, and initiators in this one."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from mooncake_kernels import config
from mooncake_kernels.__main__ import main
from mooncake_kernels.transfer import TransferEngine

from .support import START_S

MIB = 1 << 20


def start_target(*arguments: str, **environment: str) -> tuple[subprocess.Popen, str]:
    command = [sys.executable, "-m", "mooncake_kernels", "bandwidth", "--mode", "target"]
    process = subprocess.Popen(
        [*command, "--buffer-size", "4m", *arguments],
        env={**os.environ, **environment},
        text=True,
        stdout=subprocess.PIPE,
    )
    line = process.stdout.readline()  # it prints, or ends
    assert line.endswith(f" offers {4 * MIB} bytes of cpu:0\n")
    return process, line.split()[0]


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    process, name = start_target()
    yield name
    process.terminate()
    assert process.wait(START_S) == 0
    process.stdout.close()


def initiate(name: str, *arguments: str) -> int:
    small = ["--buffer-size", "4m", "--block-size", "16k", "--batch-size", "32", "--duration", ".1"]
    return main(["bandwidth", "--segment-id", name, *small, *arguments])


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("protocol", ["shm", "tcp"])
def test_reported_bytes_match_bytes_moved(protocol, operation, target, tmp_path, capsys):
    file = tmp_path / "result.json"
    words = ["--protocol", protocol, "--operation", operation, "--threads", "2"]
    assert initiate(target, *words, "--json", str(file)) == 0
    found = json.loads(file.read_text())
    batches = found["num_bytes"] / (32 * 16384)
    assert batches >= 2 and batches == int(batches)
    assert sum(found["bytes_by_path"].values()) == found["num_bytes"]
    assert (found["transport"], found["threads"]) == (protocol, 2)
    printed = capsys.readouterr().out
    assert f"{found['num_bytes']} bytes in " in printed and f"paths: {protocol}:" in printed


def test_mooncake_option_spelling_and_sequential_blocks(target, capsys):
    assert initiate(target, "--batch_size", "2", "--sequential", "--report_unit=Gb") == 0
    assert " Gb/s: " in capsys.readouterr().out


def test_corrupted_blocks_are_an_error(target, capsys, monkeypatch):
    read = TransferEngine.read_blocks

    def shifted(engine, peer, local, remote, size):
        return read(engine, peer, local, remote[::-1], size)

    monkeypatch.setattr(TransferEngine, "read_blocks", shifted)
    assert initiate(target) == 2
    assert "error: 32 of 32 blocks came back changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (["--batch-size", "257"], "--batch-size must be at most 256"),
        (["--threads", "9", "--batch-size", "32"], "--batch-size must be at most 28"),
        (["--gpu-id", "99"], "--gpu-id must be one of "),
    ],
)
def test_sizes_that_do_not_fit_are_rejected(wrong, reason, target, capsys):
    assert initiate(target, *wrong) == 2
    assert capsys.readouterr().err.startswith(f"error: {reason}")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ([], "--segment-id must name the target, got None"),
        (["--mode", "target", "--segment-id", "x"], "must not be given to a target, got x"),
        (["--segment-id", "x", "--block-size", "3x"], "must be bytes, like 65536 or 64k, got 3x"),
        (["--segment-id", "x", "--threads", "0"], "must be an integer of at least 1, got 0"),
        (["--segment-id", "x", "--duration", "inf"], "must be a number of seconds above 0, got"),
        (["--segment-id", "x", "--json", "/nowhere/x"], "must be a file in a folder that exists"),
    ],
)
def test_wrong_arguments_are_named(wrong, reason, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bandwidth", *wrong])
    assert reason in capsys.readouterr().err


def test_engine_not_started_as_target_is_rejected(capsys):
    with TransferEngine(transports=["tcp"]) as engine:
        assert initiate(engine.name, "--protocol", "tcp") == 2
    assert "is no target, which --mode target starts" in capsys.readouterr().err


def test_target_with_a_secret_rejects_others_and_is_killed_during_a_run(capsys):
    secret = "of the target, not ours"
    process, name = start_target(MOONCAKE_KERNELS_SECRET=secret)
    with process:
        assert initiate(name) == 2
        assert "secret" in capsys.readouterr().err
        threading.Timer(0.2, process.kill).start()
        with config.override(secret=secret):
            assert initiate(name, "--protocol", "tcp", "--duration", "60") == 2
    assert capsys.readouterr().err.startswith(f"error: transfer with {name}: ")


def test_ctrl_c_reports_partial_results(target, capsys, monkeypatch):
    read, count = TransferEngine.read_blocks, itertools.count()

    def interrupting(engine, *arguments):
        if next(count) == 100:
            os.kill(os.getpid(), signal.SIGINT)
        return read(engine, *arguments)

    monkeypatch.setattr(TransferEngine, "read_blocks", interrupting)
    assert initiate(target, "--duration", "600") == 0
    assert "batches/s" in capsys.readouterr().out


def test_metadata_server_url_can_be_read_from_a_file(tmp_path, capsys):
    url = "redis://user:hidden-word@127.0.0.1:1"
    file = tmp_path / "metadata"
    file.write_text(f"{url}\n")
    for words, setting, is_warned in (
        (["--metadata-server", url], "", True),
        (["--metadata-server-file", str(file)], "", False),
        ([], url, False),
    ):
        with config.override(metadata_server=setting):
            assert initiate("x", *words) == 2
        error = capsys.readouterr().err
        assert "metadata server redis://127.0.0.1:1: " in error and "hidden-word" not in error
        assert error.count("warning: --metadata-server has a login") == is_warned
    assert initiate("x", "--metadata-server", url, "--metadata-server-file", str(file)) == 2
    assert "must not be given with --metadata-server-file" in capsys.readouterr().err
    for content, reason in (("", "got nothing"), ("\xe9\n", "got something else")):
        file.write_text(content)
        assert initiate("x", "--metadata-server-file", str(file)) == 2
        assert f"must be printable ASCII, {reason}" in capsys.readouterr().err
