"""How commands end: by an error, by Ctrl-C, and after the reader of their output."""

import os
import subprocess
import sys

import pytest

from mooncake_kernels.command_line import run_command
from mooncake_kernels.topology import cli

DEADLINE_S = 120


def raising(error: BaseException):
    def run():
        raise error

    return run


@pytest.mark.parametrize(("status", "expected"), [(None, 0), (0, 0), (3, 3)])
def test_exit_status_is_that_of_the_command(status, expected):
    assert run_command(lambda: status) == expected


@pytest.mark.parametrize("error", [ValueError("it is wrong"), OSError("it is wrong")])
def test_user_error_is_one_line(error, capsys):
    assert run_command(raising(error)) == 2
    assert capsys.readouterr().err == "error: it is wrong\n"


def test_broken_pipe_other_than_stdout_is_reported(capfd):
    assert run_command(raising(BrokenPipeError("to the server"))) == 2
    sys.stdout.write("what follows is still written\n")
    assert capfd.readouterr() == ("what follows is still written\n", "error: to the server\n")


def test_other_errors_are_listed_or_keep_their_traceback(capsys):
    assert run_command(raising(RuntimeError("it is wrong")), errors=(RuntimeError,)) == 2
    assert capsys.readouterr().err == "error: it is wrong\n"
    with pytest.raises(RuntimeError):
        run_command(raising(RuntimeError()))


@pytest.mark.parametrize(("extra", "wanted"), [("", "zmq"), ("store", "'mooncake-kernels[store]'")])
def test_missing_package_is_reported_with_its_extra(extra, wanted, capsys):
    assert run_command(raising(ModuleNotFoundError(name="zmq.asyncio")), extra=extra) == 1
    assert capsys.readouterr().err == f"error: zmq is not installed: pip install {wanted}\n"
    with pytest.raises(ModuleNotFoundError):  # ours: it is no package that pip could install
        run_command(raising(ModuleNotFoundError(name="mooncake_kernels._host")))


def test_ctrl_c_exits_with_status_130(capsys):
    assert run_command(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == ""


def start(*arguments: str, **changes: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "mooncake_kernels", *arguments]
    environment = {**os.environ, **changes}
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize("command", ["secret", "config"])
def test_closed_reader_leaves_no_traceback(command):
    process = start(command)
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert (process.wait(DEADLINE_S), errors) == (1, "")


def test_closed_stdout_is_tolerated():
    command = 'exec "$0" -m mooncake_kernels secret >&-'
    ran = subprocess.run(
        ["sh", "-c", command, sys.executable], stderr=subprocess.PIPE, timeout=DEADLINE_S
    )
    assert (ran.returncode, ran.stderr) == (0, b"")


def test_topology_command_raises_if_its_reader_is_gone(monkeypatch):
    def write(text):
        raise BrokenPipeError

    monkeypatch.setattr(cli, "_write", write)
    monkeypatch.setattr(cli, "_topology", lambda options: None)
    monkeypatch.setattr(cli, "_text", lambda topology, options: "")
    options = cli.argparse.Namespace(probe=False)
    with pytest.raises(BrokenPipeError):  # which run_command takes
        cli.run(options, print)


@pytest.mark.parametrize(
    ("command", "variable"), [("metadata", "METADATA_TTL_S"), ("calibrate", "DEADLINE_S")]
)
def test_malformed_setting_gives_a_one_line_error(command, variable):
    name = f"MOONCAKE_KERNELS_{variable}"
    process = start(command, **{name: "x"})
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    assert errors.startswith(f"error: {name} must be ") and errors.count("\n") == 1


@pytest.mark.parametrize("module", ["mooncake_serving", "mooncake_serving.store"])
def test_help_needs_no_extra(module):
    code = """
import runpy, sys

module, packages = sys.argv[1:]

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in packages.split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
sys.argv = [module, "--help"]
runpy.run_module(module, run_name="__main__")
"""
    packages = "fastapi gguf jinja2 msgspec redis rich safetensors tokenizers uvicorn zmq"
    command = [sys.executable, "-c", code, module, packages]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("usage: ")
