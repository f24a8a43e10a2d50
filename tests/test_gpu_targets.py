"""`bench/gpu.sh`: what it would run on a GPU; how long its targets may take, and its verdicts."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent.parent / "bench"
LIMIT_S = 600  # as the head of gpu.sh says


def run_script(tmp_path, *words, fails="no-such-word", **variables):
    """Run the script with a python3 that only writes down what it is given, or fails at a word."""
    fake = tmp_path / "bin" / "python3"
    fake.parent.mkdir(exist_ok=True)
    fake.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$*" >>{tmp_path}/calls\n'
        f'case "$*" in *{fails}*) exit 1;; esac\n'
        'case "$PATH" in "$PYTHONPATH/bin:"*) ;; *) exit 2;; esac\n'  # where ninja is out of WHEELS
    )
    timeout = fake.with_name("timeout")  # -k 5 <seconds> <command>
    timeout.write_text(f'#!/bin/sh\nprintf "%s " "$3" >>{tmp_path}/calls\nshift 3\nexec "$@"\n')
    sanitizer = fake.with_name("compute-sanitizer")  # --tool <name> --error-exitcode 9 <command>
    sanitizer.write_text('#!/bin/sh\nshift 4\nexec "$@"\n')
    for program in (fake, timeout, sanitizer):
        program.chmod(0o755)
    environment = os.environ | {"PATH": f"{fake.parent}:{os.environ['PATH']}"} | variables
    command = ["bash", BENCH / "gpu.sh", *(words or ["--targets", "a.whl", "results"])]
    (tmp_path / "calls").write_text("")
    status = subprocess.run(command, cwd=tmp_path, env=environment).returncode
    return status, (tmp_path / "calls").read_text().splitlines()


@pytest.fixture
def calls(tmp_path):
    """The commands that the script runs."""
    status, lines = run_script(tmp_path)
    assert status == 0
    return lines


def installed(lines):
    """The folder, and what is installed there, of each call of pip."""
    found = [re.search(r"-m pip install .*--target (\S+) (.*)", line) for line in lines]
    return [match.groups() for match in found if match]


def test_each_run_installs_into_a_folder_of_its_own(tmp_path):
    [(first, _)], [(second, _)] = (installed(run_script(tmp_path)[1]) for _ in range(2))
    assert first != second and not Path(first).exists() and not Path(second).exists()


def test_wheels_are_installed_without_a_network(tmp_path):
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels/b.whl").touch()
    _, lines = run_script(tmp_path, WHEELS="wheels")
    paths = [f"{tmp_path}/wheels/b.whl", f"{tmp_path}/a.whl"]
    assert [what for _, what in installed(lines)] == paths
    assert "--no-index" in lines[0] and "--upgrade" in lines[-7]


def test_nothing_runs_if_a_requirement_is_missing(tmp_path):
    status, lines = run_script(tmp_path, fails="gpu_needs")
    assert status == 1 and [line.split()[0] for line in lines] == ["bench/lib/gpu_needs.py"]


def test_missing_requirements_are_listed_with_instructions():
    bare = [sys.executable, "-I", "-S", BENCH / "lib/gpu_needs.py"]  # no package is found
    result = subprocess.run(bare, capture_output=True, text=True)
    assert result.returncode == 1
    first, *rest = result.stderr.splitlines()
    assert {"torch", "hypothesis", "msgspec>=0.22", "pyzmq"} <= set(re.split(r"[:,]? ", first))
    assert any("pip download" in line and "'hypothesis'" in line for line in rest)
    few = subprocess.run([*bare, "--targets"], capture_output=True, text=True)
    assert few.returncode == 1 and few.stderr.startswith("gpu.sh: missing: torch, numpy\n")


def test_building_requires_ninja():
    needs = [sys.executable, BENCH / "lib/gpu_needs.py", "--targets", "--build"]
    result = subprocess.run(needs, env=os.environ | {"PATH": ""}, capture_output=True, text=True)
    assert result.returncode == 1 and "'ninja>=1.11'" in result.stderr


def test_the_quick_form_carries_no_model():
    bare = [sys.executable, "-I", "-S", BENCH / "lib/gpu_needs.py", "--quick"]
    result = subprocess.run(bare, capture_output=True, text=True)
    assert result.returncode == 1 and "pytest-xdist" in result.stderr
    assert "smollm2" not in result.stderr


@pytest.mark.parametrize("words", [["--help"], ["a.whl", "--targets"], ["a.whl", "b", "c"]])
def test_unknown_arguments_are_rejected(tmp_path, capfd, words):
    assert run_script(tmp_path, *words) == (2, [])
    assert "usage: bench/gpu.sh [--targets | --quick]" in capfd.readouterr().err


def test_a_torch_without_a_gpu_is_reported(tmp_path):
    (tmp_path / "torch.py").write_text(
        "__version__ = '2.13.0+cpu'\nclass cuda:\n is_available = lambda: False\n"
        "class version:\n cuda = None\n"
    )
    command = [sys.executable, BENCH / "lib/gpu_needs.py", "--targets"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr == "gpu.sh: torch 2.13.0+cpu is not built for CUDA\n"


def test_targets_fit_within_one_call(calls):
    limits = [int(call.split()[0]) for call in calls if call[0].isdigit()]
    assert len(limits) == 5 and sum(limits) <= 0.9 * LIMIT_S
    assert calls[-1].split()[0].endswith("gpu_targets.py")


@pytest.mark.thorough
def test_target_options_exist_in_the_benches(calls):
    they_have_their_options([call.split()[1:] for call in calls if call[0].isdigit()])


@pytest.mark.thorough
def test_without_targets_everything_available_runs(tmp_path):
    status, lines = run_script(tmp_path, "a.whl", "results")
    assert status == 0
    words = [line.split() for line in lines]
    they_have_their_options([call for call in words if "/bench_" in call[0]])
    tests = {word for call in words for word in call if "/tests/" in word}
    assert len(tests) >= 7 and all(Path(name).exists() for name in tests)
    modules = {call[1] for call in words if call[0] == "-m"}
    assert modules == {"pip", "pytest", "mooncake_kernels", "mooncake_serving"}


def test_quick_form_fits_within_one_call_and_keeps_its_output(tmp_path):
    status, lines = run_script(tmp_path, "--quick", "a.whl", "results")
    assert status == 0
    limits = {line.split()[0] for line in lines if line[0].isdigit()}
    assert max(map(int, limits - {"120"})) + 120 <= 420  # the tests run side by side, then a bench
    they_have_their_options([line.split()[1:] for line in lines if "/bench_" in line], at_least=1)
    names = {file.name for file in (tmp_path / "results").glob("quick_*.txt")}
    kinds = ("memcheck", "racecheck", "transfer", "serving", "kernels", "bench")
    assert names == {f"quick_{name}.txt" for name in kinds}
    assert {word for line in lines for word in line.split() if "/tests/" in word} >= {
        str(BENCH.parent / f"tests/{name}") for name in ("kv", "transfer/gpu", "store/gpu")
    }
    status, _ = run_script(tmp_path, "--quick", "a.whl", "results", fails="tests/store/gpu")
    assert status == 1


def they_have_their_options(calls, at_least=5):
    assert len(calls) >= at_least
    for bench, *options in calls:
        command = [sys.executable, BENCH / bench, *options, "--help"]  # looks at the others first
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        unknown = {word for word in options if word.startswith("--")} - set(
            re.findall(r"--[a-z-]+", result.stdout)
        )
        assert not unknown, bench


def write_results(folder, *, d2d=95.0, d2h=91.0, rope=0.95, host=9.0, smallest=4096):
    def row(direction, shape, runs, run_bytes, percent, max_sms=None):
        return {
            "case": f"{direction} {shape} {runs}", "direction": direction, "shape": shape,
            "runs": runs, "run_bytes": run_bytes, "percent_of_ceiling": percent,
            "ceiling_gb_per_s": 100.0, "max_sms": max_sms,
        }  # fmt: skip

    files = {
        "d2d": [
            row("D2D", "rows", 9, 656, 10), row("D2D", "small", 8, 4096, 20),
            row("D2D", "small", 9, 4096, 50), row("D2D", "small", 9, 4096, d2d),
            row("D2D", "large", 9, 1 << 20, 99),
        ],
        "pcie": [
            row("H2D", "small", 9, smallest, 92, 8), row("H2D", "large", 9, 1 << 20, 95, 8),
            row("D2H", "small", 9, smallest, d2h, 8), row("D2H", "small", 9, smallest, 99),
        ],
        "transforms": [
            {"case": f"{name}, {i}", "transform": name, "x_plain": rope if name == "RoPE" else 0.97}
            for name in ("bf16 to fp8", "fp8 to bf16", "RoPE", "checksum") for i in range(2)
        ],
        "host": [{"case": "NHD", "us": 1.0}, {"case": "host time of a call, 80", "us": host}],
        "mm": [{"case": "D2H, 8 SMs", "copy_slowdown": 1.5, "mm_slowdown": 1.02}],
    }  # fmt: skip
    for name, rows in files.items():
        lines = [json.dumps(line) + "\n" for line in ({}, *rows)]
        (folder / f"targets_{name}.jsonl").write_text("".join(lines))


def told(folder):
    command = [sys.executable, BENCH / "lib/gpu_targets.py", folder]
    result = subprocess.run(command, capture_output=True, text=True)
    assert not result.stderr
    return result.returncode, [line.split(maxsplit=1) for line in result.stdout.splitlines()]


def test_met_targets_are_reported(tmp_path):
    write_results(tmp_path)
    status, lines = told(tmp_path)
    assert status == 0 and [word for word, _ in lines] == ["MET"] * 8 + ["REPORTED"]
    assert "95.0 % of 100.0 GB/s (D2D small 9; 2 shapes)" in lines[0][1]
    assert "product 1.02x slower" in lines[-1][1]


@pytest.mark.parametrize(
    ("change", "named"),
    [({"d2d": 91.9}, "D2D, .* 91.9 %"), ({"d2h": 89.0}, "D2H, .* 89.0 %"),
     ({"rope": 0.89}, "RoPE costs .* 11.0 %"), ({"host": 10.5}, "host time .* 10.5 us")],
)  # fmt: skip
def test_missed_targets_are_reported(tmp_path, change, named):
    write_results(tmp_path, **change)
    status, lines = told(tmp_path)
    [text] = [text for word, text in lines if word == "NOT" and text.startswith("MET")]
    assert status == 0
    assert re.search(named, text)


def test_unmeasured_targets_are_reported(tmp_path):
    status, lines = told(tmp_path)
    assert status == 1 and {text.split()[0] for _, text in lines} == {"MEASURED"}
    write_results(tmp_path, smallest=8192)  # 4 KiB were cut off, or left out
    status, lines = told(tmp_path)
    assert status == 1
    missing = [text for word, text in lines if text.startswith("MEASURED")]
    assert [text.split()[1][:3] for text in missing] == ["H2D", "D2H"]
