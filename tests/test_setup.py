"""setup.py compiles a file once, however often, and in whichever environment, it is called."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
import pytest

ROOT = Path(__file__).parents[1]
OTHER_NINJA = "#!/bin/sh\necho another ninja\nexit 1\n"


@pytest.fixture
def tree(tmp_path):
    """The build with one source file for each binary."""
    tree = tmp_path / "tree"
    for family in ("ops", "host"):
        file = tree / f"csrc/{family}/{family}.cc"
        file.parent.mkdir(parents=True)
        file.write_text("")
    (tree / "csrc/host/host.cc").write_text("#include <pybind11/detail/common.h>\n")
    (tree / "mooncake_kernels").mkdir()
    for name in ("setup.py", "mooncake_kernels/config.py"):
        shutil.copy(ROOT / name, tree / name)
    return tree


def build(tree, *arguments, **variables):
    command = [sys.executable, "setup.py", "-q", "build_ext", *arguments]
    environment = {**os.environ, "MOONCAKE_KERNELS_CUDA": "0", **variables}
    environment.pop("LD_PRELOAD", None)
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_second_install_compiles_nothing(tree, tmp_path):
    assert "[4/4] link" in build(tree, "--inplace")
    names = sorted(path.name for path in (tree / "mooncake_kernels").glob("*.so"))
    assert names[0].startswith("_host.cpython-") and names[1:] == ["_ops.so"]
    assert "no work to do" in build(tree, "--build-lib", str(tmp_path / "wheel"))
    assert sorted(path.name for path in tmp_path.glob("wheel/*/*.so")) == names


def test_isolated_install_compiles_nothing(tree, tmp_path):
    """Where pip has installed pybind11 and ninja in a folder of their own, for this build."""
    isolated = tmp_path / "overlay"
    shutil.copytree(Path(pybind11.__file__).parent, isolated / "pybind11")
    (isolated / "ninja").write_text(OTHER_NINJA)
    (isolated / "ninja").chmod(0o755)
    build(tree, "--inplace")
    path = f"{isolated}:{os.environ['PATH']}"
    told = build(tree, "--inplace", PYTHONPATH=str(isolated), PATH=path)
    assert "no work to do" in told
    header = isolated / "pybind11/include/pybind11/detail/common.h"
    header.write_text(header.read_text() + "\n")  # of another version
    assert "cxx host/host/host.cc.o" in build(tree, "--inplace", PYTHONPATH=str(isolated))


def test_a_running_process_keeps_the_binary_that_it_loaded(tree):
    build(tree, "--inplace")
    binary = tree / "mooncake_kernels/_ops.so"
    with binary.open("rb") as loaded:
        (tree / "csrc/ops/ops.cc").write_text("int added() { return 1; }\n")
        build(tree, "--inplace")
        with binary.open("rb") as built:
            assert not os.path.sameopenfile(loaded.fileno(), built.fileno())


def test_a_wheel_has_the_files_that_are_not_python(tmp_path):
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for folder in ("mooncake_serving/store/directory/lua", "mooncake_serving/router/page"):
        built = sorted(path.name for path in (tmp_path / folder).iterdir())
        ours = (ROOT / "python" / folder).iterdir()
        assert built == sorted(path.name for path in ours if path.is_file())
