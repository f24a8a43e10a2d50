"""The command: its table, JSON, options and exit status."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_kernels.__main__ import main
from mooncake_kernels.doctor import Finding, State, commands
from mooncake_kernels.doctor.commands import with_packages
from mooncake_kernels.doctor.examine import CHECKS_OF
from mooncake_kernels.doctor.inspect import OPTIONAL_PACKAGES
from mooncake_kernels.doctor.report import summary, table

KEYS = ["group", "check", "subject", "state", "detail", "fix", "why"]


def test_doctor_runs_on_this_machine(capsys):
    status = main(["doctor", "--only", "libraries"])
    out = capsys.readouterr().out
    assert status == int("problem" in out.split()[0])
    rows = [line.split() for line in out.splitlines()]
    assert ["ok", "operators"] in [row[:2] for row in rows]
    assert "nvidia-ml-py" in out
    assert any(row[-1:] and row[-1].startswith("warning") for row in rows)


def test_healthy_machine_exits_with_zero(machine, capsys):
    root = machine.root().root
    assert main(["doctor", "--root", str(root)]) == 0
    out = capsys.readouterr().out
    assert out.endswith("\n0 problems, 0 warnings, 1 unknown\n")  # what libibverbs has
    assert "mlx5_0 port 1, mlx5_1 port 1 and 6 more" in out
    assert max(len(line) for line in out.splitlines()) < 200


def test_problems_come_first_and_set_the_exit_status(machine, capsys):
    machine.files["/proc/self/limits"] = "Max locked memory  8388608  unlimited  bytes\n"
    machine.files["/proc/sys/vm/overcommit_memory"] = "2\n"
    assert main(["doctor", "--root", str(machine.root().root)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("problem  memlock: this process: 8 MiB")
    assert lines[1].startswith("         why: registered memory is locked")
    assert lines[2] == "         fix: ulimit -l unlimited"
    assert lines[4].startswith("warning  overcommit")
    assert lines[-1].startswith("1 problem, 1 warning")


def test_warnings_keep_exit_status_zero(machine):
    machine.files["/proc/sys/vm/overcommit_memory"] = "2\n"
    assert main(["doctor", "--root", str(machine.root().root), "--only", "memory"]) == 0


def test_fixes_name_packages_of_missing_commands(machine):
    machine.files["/proc/sys/vm/overcommit_memory"] = "2\n"
    machine.here = dataclasses.replace(
        machine.here, missing_commands={"sysctl": "sysctl: apt install procps"}
    )
    [finding] = machine.bad()
    assert finding.fix == "sysctl -w vm.overcommit_memory=0 (sysctl: apt install procps)"


@pytest.mark.parametrize(
    "fix, missing, expected",
    [
        ("ip link set dev a up", ["ip"], "ip link set dev a up (I)"),
        ("ip link set dev a down && ip link set dev a up", ["ip"], "(I)"),
        ("check cable: rdma link show a/1; ethtool b", ["ip", "rdma", "ethtool"], "(R; E)"),
        ("reseat the card, or: setpci -s 0", ["setpci"], "(S)"),
        ("pip install triton", ["ip", "setpci"], "pip install triton"),
        ("docker run --device /dev/infiniband", ["ip"], "/dev/infiniband"),
    ],
)
def test_fix_lists_packages_of_the_commands_it_uses(fix, missing, expected):
    assert with_packages(fix, {name: name[0].upper() for name in missing}).endswith(expected)


def test_all_commands_missing_from_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(commands, "_FOLDERS", str(tmp_path))
    missing = commands.missing_commands()
    assert missing.keys() == commands.PACKAGES.keys()
    assert missing["ip"] == "ip: apt install iproute2, or dnf install iproute"


def test_json_report_format(machine, capsys):
    machine.files["/proc/sys/vm/overcommit_memory"] = "2\n"
    assert main(["doctor", "--json", "--root", str(machine.root().root), "--only", "memory"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["findings", "summary"]
    assert all(list(finding) == KEYS for finding in report["findings"])
    assert report["summary"] == {"problem": 0, "warning": 1, "unknown": 0, "info": 0, "ok": 3}
    (bad,) = [finding for finding in report["findings"] if finding["state"] == "warning"]
    assert bad["group"] == "memory" and bad["fix"] == "sysctl -w vm.overcommit_memory=0"


def test_empty_root_has_no_problems(tmp_path, capsys):
    assert main(["doctor", "--json", "--root", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["problem"] == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--root", "/nowhere/at/all"], "--root must be a folder, got '/nowhere/at/all'"),
        (["--root", ""], "--root must be a folder, got ''"),
        (["--only", "memlock,memlok"], "got 'memlok'"),
        (["--only", ""], "got ''"),
        (["--color"], "--color"),
    ],
)
def test_bad_arguments_are_rejected(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["doctor", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_only_lists_the_valid_names(capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--only", "x"])
    error = capsys.readouterr().err
    assert "memlock" in error and "isolation" in error


def test_summary_counts_states():
    def finding(state):
        return Finding("memlock", "x", state, "d", None, "w")

    states = [State.PROBLEM, State.WARNING, State.WARNING, State.UNKNOWN, State.OK]
    assert summary([finding(state) for state in states]) == "1 problem, 2 warnings, 1 unknown"
    assert table([]) == "0 problems, 0 warnings\n"


def test_failed_check_is_in_the_table():
    failed = Finding("limits", "doctor", State.UNKNOWN, "the check failed: X", None, "w")
    assert "the check failed: X" in table([failed])


def test_importing_the_package_does_not_import_the_doctor():
    code = "import sys, mooncake_kernels; print(any('.doctor' in name for name in sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def test_every_check_is_documented():
    text = (Path(__file__).parents[2] / "docs/transfer/doctor.md").read_text()
    for checks in CHECKS_OF.values():
        for check in checks:
            assert f"| `{check}` |" in text


def test_every_optional_package_is_checked():
    tomllib = pytest.importorskip("tomllib", reason="it is of Python 3.11")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wanted = {
        requirement.partition(">=")[0]
        for extra, requirements in project["optional-dependencies"].items()
        for requirement in requirements
        if extra not in ("test", "bench") and not requirement.startswith("mooncake-kernels")
        if "python_version" not in requirement  # what other versions of Python have themselves
    }
    assert wanted == set(OPTIONAL_PACKAGES)


def test_rows_are_merged_only_if_they_share_a_fix():
    def finding(subject, fix):
        return Finding("thp", subject, State.INFO, "never", fix, "w")

    out = table([finding("a", "x"), finding("b", "x"), finding("c", "y")])
    assert "a, b  never; x" in out and "c     never; y" in out


def test_bad_settings_are_reported(capsys, monkeypatch):
    monkeypatch.setenv("MOONCAKE_KERNELS_THREADS", "x")
    monkeypatch.setenv("MOONCAKE_KERNELS_THREDS", "3")
    monkeypatch.setenv("MOONCAKE_KERNELS_CUDA", "0")  # of the build
    monkeypatch.setenv("MOONCAKE_KERNELS_CUDA_ARCHS", "new")
    assert main(["doctor", "--json", "--only", "settings"]) == 1
    found = {f["subject"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    wrong = {"MOONCAKE_KERNELS_THREADS", "MOONCAKE_KERNELS_THREDS", "MOONCAKE_KERNELS_CUDA_ARCHS"}
    assert set(found) == wrong
    assert (
        "must be an integer in [0, 2147483647], got 'x'"
        in (found["MOONCAKE_KERNELS_THREADS"]["detail"])
    )
    unknown = found["MOONCAKE_KERNELS_THREDS"]
    assert unknown["detail"] == "there is no such setting" and unknown["state"] == "warning"
    assert unknown["fix"] == "unset MOONCAKE_KERNELS_THREDS"
