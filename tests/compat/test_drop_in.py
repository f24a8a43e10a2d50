"""``python -m mooncake_kernels drop-in``: in environments of their own, with packages of a few
lines; and once the real ones.
"""

import dataclasses
import errno
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from mooncake_kernels import drop_in
from mooncake_kernels.errors import Unavailable

ROOT = Path(__file__).parents[2]
TARGET = drop_in.Target("theirs", "theirs-engine", "1.2", "ours.theirs", ("api", "_low"), ("more",))


class Environment:
    """A virtual environment whose installed packages are ``ours``, and what a test adds."""

    def __init__(self, folder: Path):
        subprocess.run(
            [sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=120
        )
        self.python = str(folder / "bin/python")
        vars_ = {"base": str(folder), "platbase": str(folder)}
        self.site = Path(sysconfig.get_path("purelib", scheme="venv", vars=vars_))
        self.ours = self.site / "ours/theirs"
        self.ours.mkdir(parents=True)
        (self.site / "ours/__init__.py").touch()
        (self.ours / "__init__.py").write_text("from .api import call\n_hidden = 1\n")
        (self.ours / "api.py").write_text("from . import _low\ndef call(): return _low.NUMBER\n")
        (self.ours / "_low.py").write_text("NUMBER = 7\n")

    def install_theirs(self, name: str = "theirs_engine", version: str = "1.1") -> None:
        """As a wheel would be."""
        (self.site / "theirs").mkdir()
        (self.site / "theirs/__init__.py").write_text("")
        (self.site / "theirs/api.py").write_text("def call(): return 'theirs'\n")
        info = self.site / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "INSTALLER").write_text("pip\n")
        (info / "RECORD").write_text("theirs/__init__.py,,\ntheirs/api.py,,\n")

    def run(self, code: str) -> str:
        """What a program prints; or the last line of its error."""
        command = [self.python, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=120)
        return done.stdout.strip() or done.stderr.strip().rpartition("\n")[2]

    def written(self) -> list[str]:
        return sorted(p.name for p in self.site.iterdir() if drop_in.FOLDER in p.name)


@pytest.fixture
def environment(tmp_path, monkeypatch):
    environment = Environment(tmp_path / "venv")
    monkeypatch.setattr(sys, "executable", environment.python)
    monkeypatch.setattr(sys, "path", [str(environment.site)])
    monkeypatch.setattr(drop_in, "TARGETS", {"theirs": TARGET})
    return environment


def enable(environment, *, over: bool = False) -> str:
    return drop_in.enable(["theirs"], over_installed=over, site=environment.site)


def look(environment, monkeypatch) -> str:
    """The status, by a ``sys.path`` as a new process has it."""
    path = environment.run("import sys; print('\\n'.join(sys.path[1:]))").splitlines()
    monkeypatch.setattr(sys, "path", path)
    return drop_in.status(["theirs"], environment.site)


def test_enabled_names_resolve_to_our_modules(environment):
    assert enable(environment).startswith("theirs: enabled, ours.theirs by ")
    program = """
import importlib.metadata, importlib.util
print(all(importlib.util.find_spec(name) for name in ("theirs", "theirs.api", "theirs._low")))
import theirs
print(theirs.call(), theirs.api.call(), theirs._low.NUMBER, hasattr(theirs, "_hidden"))
import theirs.api, ours.theirs.api
from theirs import api
from theirs.api import call
print(theirs.api is api is ours.theirs.api, call is ours.theirs.call)
print(importlib.metadata.version("theirs-engine"), importlib.util.find_spec("theirs.more"))
print(importlib.metadata.packages_distributions()["theirs"])
"""
    assert environment.run(program).splitlines() == [
        "True",
        "7 7 7 False",
        "True True",
        "1.2+mooncake.kernels None",
        "['theirs-engine']",
    ]


def test_enable_again_changes_nothing(environment):
    enable(environment)
    before = {p: p.stat().st_mtime_ns for p in environment.site.rglob("*") if p.suffix == ".py"}
    assert enable(environment) == "theirs: was enabled already\n"
    assert before == {p: p.stat().st_mtime_ns for p in before}


def test_enable_brings_an_older_drop_in_up_to_date(environment):
    enable(environment)
    folder = environment.site / f"{drop_in.FOLDER}theirs"
    (folder / "theirs/api.py").write_text("an older version wrote something else\n")
    (environment.ours / "more.py").write_text("MORE = 1\n")
    assert enable(environment).startswith("theirs: enabled")
    assert environment.run("import theirs.more, theirs.api; print(theirs.call())") == "7"


def test_disable_removes_all_that_was_written(environment):
    before = sorted(environment.site.rglob("*"))
    enable(environment)
    environment.run("import theirs.api")  # which compiles it
    for path in environment.site.rglob("ours/**/__pycache__"):
        shutil.rmtree(path)
    assert drop_in.disable(["theirs"], environment.site) == "theirs: disabled\n"
    assert sorted(environment.site.rglob("*")) == before
    assert drop_in.disable(["theirs"], environment.site) == "theirs: was not enabled\n"
    assert "No module named 'theirs'" in environment.run("import theirs")


def test_disable_leaves_files_of_others(environment):
    enable(environment)
    other = environment.site / f"{drop_in.FOLDER}theirs/theirs/note.txt"
    other.write_text("mine")
    told = drop_in.disable(["theirs"], environment.site)
    assert "theirs: left, as others wrote it: " in told and str(other) in told
    assert other.read_text() == "mine" and environment.run("import theirs.api").count("theirs")


def test_pip_sees_a_package_that_it_can_uninstall(environment):
    """RECORD names every file, with its digest, and the .pth file."""
    enable(environment)
    program = """
import importlib.metadata, hashlib, base64
one = importlib.metadata.distribution("theirs-engine")
for file in one.files:
    data = file.locate().read_bytes()
    if file.hash:
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert (file.hash.mode, file.hash.value, file.size) == ("sha256", digest, len(data)), file
    file.locate().unlink()
print(one.read_text("RECORD"), one.requires)
"""
    assert environment.run(program) == "None None"
    folder = environment.site / f"{drop_in.FOLDER}theirs"
    assert not [p for p in folder.rglob("*") if p.is_file()]
    assert environment.written() == [folder.name]


@pytest.mark.parametrize("name", ["theirs_engine", "Theirs.Engine.cuda13"])
def test_installed_package_is_not_shadowed(environment, monkeypatch, name):
    environment.install_theirs(name)
    with pytest.raises(Unavailable, match=f"theirs must not be installed, got {name} 1.1 in .*ove"):
        enable(environment)
    assert environment.written() == []
    assert look(environment, monkeypatch).startswith(f"theirs: {name} 1.1 in ")

    enable(environment, over=True)
    assert environment.run("import theirs; print(theirs.call())") == "7"
    told = look(environment, monkeypatch)
    assert f"it precedes {name} 1.1 in " in told and "ours.theirs of mooncake-kernels" in told
    assert enable(environment, over=True) == "theirs: was enabled already\n"
    drop_in.disable(["theirs"], environment.site)
    assert environment.run("import theirs.api; print(theirs.api.call())") == "theirs"


def test_a_wheel_that_is_installed_later_wins_and_status_says_so(environment, monkeypatch):
    enable(environment)
    assert "ours.theirs of mooncake-kernels, by" in look(environment, monkeypatch)
    environment.install_theirs()
    assert environment.run("import theirs.api; print(theirs.api.call())") == "theirs"
    told = look(environment, monkeypatch)
    assert told.startswith("theirs: theirs_engine 1.1 in ") and "is not in effect: enable" in told


def test_a_package_of_no_distribution_is_not_shadowed(environment):
    (environment.site / "theirs").mkdir()
    (environment.site / "theirs/__init__.py").touch()
    with pytest.raises(Unavailable, match=r"must not be installed, got .*theirs/__init__\.py"):
        enable(environment)


def test_status_without_anything(environment, monkeypatch):
    assert look(environment, monkeypatch) == "theirs: nothing: it cannot be imported\n"


def test_a_drop_in_without_our_package_says_how_to_remove_it(environment, monkeypatch):
    """What was uninstalled cannot say so itself."""
    enable(environment)
    shutil.rmtree(environment.site / "ours")
    for program in ("import theirs", "import theirs.api", "from theirs._low import NUMBER"):
        told = environment.run(program)
        assert told.startswith("ModuleNotFoundError: theirs is a drop-in of mooncake-kernels, whi")
    assert "importing it fails, for ours.theirs is not" in look(environment, monkeypatch)
    command = told.partition("to remove it: ")[2]
    subprocess.run(command, shell=True, check=True, timeout=60)
    assert environment.written() == []
    assert environment.run("import theirs") == "ModuleNotFoundError: No module named 'theirs'"


def test_a_package_missing_inside_ours_is_named_as_it_is(environment):
    enable(environment)
    (environment.ours / "_low.py").write_text("import some_extra\n")
    assert environment.run("import theirs") == "ModuleNotFoundError: No module named 'some_extra'"


def test_enable_refuses_what_we_do_not_have(environment):
    (environment.ours / "_low.py").unlink()
    with pytest.raises(Unavailable, match=r"ours\.theirs must be installed .* and has no _low"):
        enable(environment)


def test_enable_refuses_what_a_new_process_cannot_import(environment):
    (environment.ours / "api.py").write_text("raise OSError('no libcuda')\n")
    with pytest.raises(Unavailable, match=r"must be able to import .*no libcuda\); nothing was ch"):
        enable(environment)
    assert environment.written() == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS])
def test_a_folder_that_cannot_be_written_to(environment, monkeypatch, code):
    def refuse(*_args, **_options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(Unavailable, match=f"write to {environment.site} .{os.strerror(code)}.: ru"):
        enable(environment)
    monkeypatch.undo()
    assert environment.written() == []


def test_a_full_disk_leaves_nothing(environment, monkeypatch):
    real = Path.write_text

    def write_some(path, text, *args):
        if path.name == "RECORD":
            raise OSError(errno.ENOSPC, "no space")
        return real(path, text, *args)

    monkeypatch.setattr(Path, "write_text", write_some)
    with pytest.raises(OSError, match="no space"):
        enable(environment)
    assert environment.written() == []


def contents(environment) -> dict:
    names = [environment.site / name for name in environment.written()]
    files = [file for name in names for file in (name, *name.rglob("*")) if file.is_file()]
    return {file: file.read_text() for file in files if file.suffix != ".pyc"}


@pytest.mark.parametrize("failure", ["check", "mkdir", "chmod", "rename", "interrupt"])
def test_a_failed_enable_leaves_what_was_enabled(environment, monkeypatch, failure):
    enable(environment)
    before = contents(environment)

    def interrupt(_targets):
        raise KeyboardInterrupt

    def full(*_args, **_options):
        raise OSError(errno.ENOSPC, "no space")

    if failure == "check":
        (environment.ours / "api.py").write_text("raise OSError('no libcuda')\n")
    elif failure == "interrupt":
        monkeypatch.setattr(drop_in, "_check_found", interrupt)
    elif failure == "rename":  # of the last one
        real = Path.rename

        def rename(path, target):
            return full() if path.suffix == ".new" else real(path, target)

        monkeypatch.setattr(Path, "rename", rename)
    else:
        monkeypatch.setattr(Path, failure, full)
    reasons = {"check": Unavailable, "interrupt": KeyboardInterrupt}
    with pytest.raises(reasons.get(failure, OSError)):
        enable(environment, over=True)
    monkeypatch.undo()
    assert contents(environment) == before and len(before) == 8
    assert len(environment.written()) == 2
    if failure != "check":
        assert environment.run("import theirs; print(theirs.call())") == "7"


def test_enable_does_not_replace_a_folder_with_files_of_others(environment):
    enable(environment)
    other = environment.site / f"{drop_in.FOLDER}theirs/theirs/note.txt"
    other.write_text("mine")
    before = contents(environment)
    assert enable(environment) == "theirs: was enabled already\n"
    with pytest.raises(Unavailable, match=f"no files of others to be replaced, got {other}: move"):
        enable(environment, over=True)
    assert contents(environment) == before


def test_what_is_written_is_for_all_users(environment):
    umask = os.umask(0o077)
    try:
        enable(environment)
    finally:
        os.umask(umask)
    paths = [environment.site / name for name in environment.written()]
    inside = [path for path in paths[0].rglob("*") if "__pycache__" not in path.parts]
    for path in (*paths, *inside):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path
    paths[1].parent.joinpath(f"{drop_in.FOLDER}theirs/theirs/api.py").chmod(0o600)
    assert enable(environment).startswith("theirs: enabled")


def test_the_drop_in_of_an_outer_environment_is_known(environment, tmp_path, monkeypatch):
    outer = Environment(tmp_path / "outer")
    (environment.site / "outer.pth").write_text(
        f"import site; site.addsitedir({str(outer.site)!r})"
    )
    monkeypatch.setattr(sys, "executable", outer.python)
    drop_in.enable(["theirs"], over_installed=False, site=outer.site)
    monkeypatch.setattr(sys, "executable", environment.python)

    told = look(environment, monkeypatch)
    folder = outer.site / f"{drop_in.FOLDER}theirs"
    assert told.startswith("theirs: ours.theirs of mooncake-kernels, by ")
    assert told.endswith(f"it was enabled in another environment, by {folder}\n")
    told = drop_in.disable(["theirs"], environment.site)
    assert told == f"theirs: was not enabled in this environment, but is by {folder}\n"
    assert enable(environment).startswith("theirs: enabled")
    assert "not in effect" not in look(environment, monkeypatch)
    assert drop_in.disable(["theirs"], environment.site) == "theirs: disabled\n"
    assert environment.run("import theirs; print(theirs.call())") == "7"


@pytest.fixture
def command(environment, monkeypatch):
    """The file of a command that the package brings."""
    (environment.ours / "run.py").write_text("import sys; print('ran', sys.argv[1:])")
    target = dataclasses.replace(TARGET, commands=(("theirs_master", "ours.theirs.run"),))
    monkeypatch.setattr(drop_in, "TARGETS", {"theirs": target})
    monkeypatch.setenv("PATH", str(environment.site.parent))
    return Path(environment.python).with_name("theirs_master")


def test_a_command_runs_our_module_and_goes_with_the_drop_in(environment, monkeypatch, command):
    assert look(environment, monkeypatch).endswith("theirs_master: nothing\n")
    assert enable(environment).endswith(f"theirs_master: {command} runs ours.theirs.run\n")
    done = subprocess.run([command, "--port", "a b"], capture_output=True, text=True, timeout=120)
    assert done.stdout == "ran ['--port', 'a b']\n", done.stderr
    assert look(environment, monkeypatch).endswith(
        f"theirs_master: {command}, of mooncake-kernels\n"
    )
    assert "theirs: was enabled already\n" in enable(environment)
    program = """
import importlib.metadata
files = importlib.metadata.distribution("theirs-engine").files
print(*(file.locate().resolve() for file in files if file.name == "theirs_master"))
"""
    assert environment.run(program) == str(command.resolve())
    told = drop_in.disable(["theirs"], environment.site)
    assert told == f"theirs_master: removed {command}\ntheirs: disabled\n"
    assert not command.exists()


@pytest.mark.parametrize("is_beside", [True, False])
def test_a_command_of_others_is_neither_replaced_nor_shadowed(
    environment, monkeypatch, command, is_beside
):
    other = command if is_beside else environment.site.parent / command.name
    other.write_text("#!/bin/sh\necho theirs\n")
    other.chmod(0o755)
    told = enable(environment)
    assert told.endswith(
        f"theirs_master: {other} is of others, and stays: use python -m ours.theirs.run\n"
    )
    assert environment.run("import theirs; print(theirs.call())") == "7"
    assert look(environment, monkeypatch).endswith(f"theirs_master: {other}, of others\n")
    assert drop_in.disable(["theirs"], environment.site) == "theirs: disabled\n"
    assert other.read_text().endswith("echo theirs\n") and command.exists() == is_beside


def test_a_command_that_cannot_be_written_leaves_nothing(environment, monkeypatch, command):
    real = Path.write_text

    def write_some(path, text, *args):
        if command.name in path.name:
            raise OSError(errno.ENOSPC, "no space")
        return real(path, text, *args)

    monkeypatch.setattr(Path, "write_text", write_some)
    with pytest.raises(OSError, match="no space"):
        enable(environment)
    assert environment.written() == [] and not command.exists()


USE = """
import importlib.util, os
assert importlib.util.find_spec("mooncake.engine") and importlib.util.find_spec("mooncake.store")
from mooncake.engine import TransferEngine
from mooncake.mooncake_config import MooncakeConfig
from mooncake.store import MooncakeDistributedStore, MooncakeHostMemAllocator, ReplicateConfig
import mooncake.store
from mooncake_serving.compat import mooncake as ours
ours.install()  # and both at once
assert mooncake.store is ours.store and TransferEngine is ours.TransferEngine
print(os.path.basename(os.path.dirname(os.path.dirname(mooncake.__file__))))
"""


@pytest.fixture
def real(tmp_path):
    """An environment with this project, and all that it needs, but no package ``mooncake``."""
    environment = Environment(tmp_path / "venv")
    packages = tmp_path / "packages"
    packages.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"mooncake|nixl|__editable__|.*\.pth$", path.name):
            (packages / path.name).symlink_to(path)
    lines = [ROOT, ROOT / "python", packages]
    (environment.site / "base.pth").write_text("".join(f"{line}\n" for line in lines))
    return environment


def drop_in_command(environment, *words: str) -> str:
    command = [environment.python, "-m", "mooncake_kernels", "drop-in", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_mooncake_is_ours_after_the_command(real):
    assert "mooncake: enabled" in drop_in_command(real, "enable", "mooncake")
    assert real.run(USE) == f"{drop_in.FOLDER}mooncake"
    told = drop_in_command(real, "status")
    assert "mooncake: mooncake_serving.compat.mooncake of mooncake-kernels, by " in told
    assert "says it is mooncake-transfer-engine 0.3.13.post1+mooncake.kernels" in told
    assert "nixl: nothing" in told
    master = Path(real.python).with_name("mooncake_master")
    done = subprocess.run([master, "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--directory URL" in done.stdout, done.stderr
    assert f"mooncake_master: {master}, of mooncake-kernels" in told
    told = drop_in_command(real, "disable")
    removed = f"mooncake_master: removed {master}\n"
    assert told == f"{removed}mooncake: disabled\nnixl: was not enabled\n"


def test_nixl_is_ours_after_the_command(real):
    if not (ROOT / "python/mooncake_serving/compat/nixl/_api.py").is_file():
        pytest.skip("mooncake_serving.compat.nixl is not there yet")
    assert "nixl: enabled" in drop_in_command(real, "enable", "nixl")
    program = "import nixl._bindings\nfrom nixl._api import nixl_agent, nixl_agent_config\n"
    told = real.run(program + "print(nixl_agent.__module__)")
    assert told.startswith("mooncake_serving.compat.nixl")


def test_names_are_checked_by_the_command():
    command = [sys.executable, "-m", "mooncake_kernels", "drop-in", "disable", "numpy"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "must be mooncake or nixl, got 'numpy'" in done.stderr
