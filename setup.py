"""Builds the two binaries of the package with ninja (metadata is in pyproject.toml):

  mooncake_kernels/_ops.so      torch operators, CPU and, where nvcc is found, CUDA. It uses the
                                LibTorch stable ABI and contains no Python: one file for every
                                Python and every torch from 2.11.
  mooncake_kernels/_host.*.so   pybind11 module: hashing, topology, RDMA, the store, transfer. It
                                does not use torch.

Sources are globbed: a new file in an existing family needs no edit here. The environment variables
are those of BuildSettings in mooncake_kernels/config.py, and CXX, CUDA_HOME and MAX_JOBS.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
OPS_FAMILIES = ("common", "ops", "kv", "mask", "attention", "similarity")
HOST_FAMILIES = ("common", "host", "hash", "topology", "rdma", "served", "store", "transfer")
HOST_ONLY = "common/fault_guard.cc"  # wants static TLS, where _ops.so's thread-locals do not fit
TORCH_TARGET_VERSION = "0x020b000000000000ULL"  # 2.11: the oldest torch that _ops.so loads under


def load_config():
    """mooncake_kernels/config.py, without importing the package (which needs torch)."""
    spec = importlib.util.spec_from_file_location("config", ROOT / "mooncake_kernels/config.py")
    config = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = config  # dataclasses look their module up
    spec.loader.exec_module(config)
    return config


CONFIG = load_config()
BUILD = CONFIG.read(CONFIG.BuildSettings)


def find_torch() -> Path:
    """The installed torch's folder, found without importing it.

    In pip's isolated build torch cannot be imported, but sysconfig still names the environment
    that pip installs into.
    """
    site = (*sys.path, sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    for folder in [Path(BUILD.torch)] if BUILD.torch else [Path(path) / "torch" for path in site]:
        if (folder / "include/torch/csrc/stable/library.h").is_file():
            return folder.resolve()
    sys.exit(
        "mooncake-kernels: found no torch >= 2.11 to build against. Install torch first, then "
        "`pip install .`; with uv, or with torch elsewhere, add `--no-build-isolation` or set "
        f"{CONFIG.PREFIX}TORCH=<site-packages>/torch."
    )


def find_cuda() -> Path | None:
    """The CUDA toolkit's folder; None to build without CUDA."""
    if BUILD.cuda == "0":
        return None
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1]]
    for home in filter(None, [*homes, "/usr/local/cuda"]):
        # An nvcc on PATH may be a wrapper script outside the toolkit: look for a header as well.
        if (Path(home) / "bin/nvcc").is_file() and (
            Path(home) / "include/cuda_runtime.h"
        ).is_file():
            return Path(home).resolve()
    if BUILD.cuda == "1":
        sys.exit(f"mooncake-kernels: {CONFIG.PREFIX}CUDA=1, but no nvcc was found (set CUDA_HOME)")
    return None


def sources(families: tuple[str, ...], suffix: str) -> list[Path]:
    return sorted(file for family in families for file in (ROOT / "csrc" / family).rglob(suffix))


def check_tools() -> None:
    """pip's isolated build installs these; without isolation they must be here."""
    needed = {"setuptools>=77": int(setuptools.__version__.split(".")[0]) >= 77}
    needed["pybind11>=2.12"] = importlib.util.find_spec("pybind11") is not None
    needed["ninja>=1.11"] = find_ninja() is not None
    if not all(needed.values()):
        missing = " ".join(f"'{name}'" for name, is_here in needed.items() if not is_here)
        sys.exit(f"mooncake-kernels: a build without isolation needs: pip install {missing}")


def find_ninja() -> str | None:
    """Next to this Python, whose environment may not be activated, or on PATH.

    The same one for every way to build: ninja compiles everything again after another version.
    """
    return shutil.which("ninja", path=Path(sys.executable).parent) or shutil.which("ninja")


def copy_headers(source: Path, copy: Path) -> Path:
    """Copy headers that lie in another folder in every isolated build, those that differ."""
    for file in source.rglob("*.h"):
        target = copy / file.relative_to(source)
        if not target.is_file() or target.read_bytes() != file.read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    return copy


def escaped(path: str | Path) -> str:
    """A path as ninja reads it."""
    return re.sub(r"([$ :])", r"$\1", str(path))


class NinjaFile:
    """What is compiled, with which flags, into which file."""

    def __init__(self, folder: Path):
        self.folder = folder  # where ninja runs
        self.cxx = os.environ.get("CXX", "g++")
        self.ccache = shutil.which("ccache") or ""
        self.instrument = [f"-fsanitize={','.join(BUILD.sanitize)}"] if BUILD.sanitize else []
        if BUILD.coverage:  # threads and forked processes count, too
            self.instrument += ["--coverage", "-fprofile-update=atomic"]
        self.lines = []
        self.add_rule("cxx", f"{self.ccache} {self.cxx} $flags -MD -MF $out.d -c $in -o $out")
        self.add_rule("link", f"{self.cxx} -shared -o $out $in $flags", depfile=False)

    def add_rule(self, name: str, command: str, *, depfile: bool = True) -> None:
        self.lines += [f"rule {name}", f"  command = {command}", f"  description = {name} $out"]
        self.lines += ["  depfile = $out.d", "  deps = gcc"] if depfile else []

    def add_build(self, out: str, rule: str, inputs: list[str], flags: list[str]) -> str:
        files = " ".join(map(escaped, inputs))
        words = shlex.join(flags).replace("$", "$$")
        self.lines += [f"build {escaped(out)}: {rule} {files}", f"  flags = {words}"]
        return out

    def compile(self, prefix: str, files: list[Path], rule: str, flags: list[str]) -> list[str]:
        """Object files, one per source: `prefix` separates the two builds of csrc/common."""
        return [
            self.add_build(
                f"{prefix}/{file.relative_to(ROOT / 'csrc')}.o", rule, [str(file)], flags
            )
            for file in files
        ]

    def cxx_flags(self, *includes: Path | str) -> list[str]:
        warnings = ["-Wall", "-Wextra", "-Wno-unused-parameter"]
        optimize = "-O1" if self.instrument else "-O3"  # half the compile time
        return [
            *(optimize, "-g1", "-std=c++17", "-fPIC", "-fvisibility=hidden", *warnings),
            *(f"-ffile-prefix-map={ROOT}/=", f"-I{ROOT}/csrc"),
            *(word for include in includes for word in ("-isystem", str(include))),
            *self.instrument,
        ]

    def ops(self, out: Path, torch: Path, cuda: Path | None) -> None:
        flags = [
            *self.cxx_flags(torch / "include", *([cuda / "include"] if cuda else [])),
            f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}",
        ]
        # libtorch.so by name, without a path: it is always loaded before us.
        link = [f"-L{torch}/lib", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-Wl,--as-needed"]
        objects = []
        if cuda:
            flags.append("-DMK_WITH_CUDA")
            objects = self.cuda_objects(cuda)
            # cudart is static and opens libcuda.so.1 at its first call: no driver, no problem.
            link += [f"-L{cuda}/lib64", "-lcudart_static", "-lrt", "-lpthread"]
            link += ["-Wl,--exclude-libs,ALL"]
        if not self.instrument:
            link.append("-Wl,-z,defs")  # an undefined symbol fails here, not at import
        files = [file for file in sources(OPS_FAMILIES, "*.cc") if not file.match(HOST_ONLY)]
        objects += self.compile("ops", files, "cxx", flags)
        self.add_build(str(out), "link", objects, [*link, "-ldl", *self.instrument])

    def cuda_objects(self, cuda: Path) -> list[str]:
        archs = BUILD.cuda_archs
        targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
        targets.append(f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}")
        flags = ["-O3", "-std=c++17", "-lineinfo", f"-ccbin={self.cxx}", f"-I{ROOT}/csrc", *targets]
        flags.append("-Xcompiler=-fPIC,-fvisibility=hidden")
        nvcc = shlex.quote(f"{cuda}/bin/nvcc").replace("$", "$$")
        command = f"{self.ccache} {nvcc} $flags -MD -MF $out.d -c $in -o $out"
        self.add_rule("nvcc", command)
        return self.compile("ops", sources(OPS_FAMILIES, "*.cu"), "nvcc", flags)

    def host(self, out: Path, cuda: Path | None) -> None:
        import pybind11

        pybind11_include = copy_headers(Path(pybind11.get_include()), self.folder / "include")
        includes = [pybind11_include, sysconfig.get_path("include")]
        includes += [ROOT / "third_party", ROOT / "third_party/rdma-core"]
        flags = self.cxx_flags(*includes, *([cuda / "include"] if cuda else []))
        bindings = sources(("host",), "*.cc")
        rest = [file for file in sources(HOST_FAMILIES, "*.cc") if file not in bindings]
        objects = self.compile("host", rest, "cxx", flags)
        # Sanitizers have much to add to pybind11's templates: half the compile time.
        unoptimized = ["-O0"] if self.instrument else []
        objects += self.compile("host", bindings, "cxx", flags + unoptimized)
        self.add_build(str(out), "link", objects, ["-ldl", "-lpthread", *self.instrument])


class BuildExt(build_ext):
    def get_ext_filename(self, fullname):
        name = super().get_ext_filename(fullname)
        if fullname.endswith("_ops"):  # no Python in it, so no Python tag in its name
            return name.replace(sysconfig.get_config_var("EXT_SUFFIX"), ".so")
        return name

    def build_extensions(self):
        # One folder for every way to build (wheel, editable, build_ext), so that all are
        # incremental; a separate one for sanitizers and for coverage.
        counts = ["coverage"] if BUILD.coverage else []
        kind = "-".join([sysconfig.get_config_var("SOABI"), *BUILD.sanitize, *counts])
        folder = ROOT / "build" / kind
        folder.mkdir(parents=True, exist_ok=True)
        wanted = [Path(self.get_ext_fullpath(extension.name)) for extension in self.extensions]
        ops, host = (folder / file.name for file in wanted)
        ninja_file = NinjaFile(folder)
        cuda = find_cuda()
        ninja_file.ops(ops, find_torch(), cuda)
        ninja_file.host(host, cuda)
        (folder / "build.ninja").write_text("\n".join(ninja_file.lines) + "\n")
        jobs = ["-j", os.environ["MAX_JOBS"]] if "MAX_JOBS" in os.environ else []
        # A make that runs this names its job server there, but has closed it for its children.
        environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}
        try:
            ninja = find_ninja() or "ninja"
            subprocess.run([ninja, "-C", str(folder), *jobs], check=True, env=environment)
        except subprocess.CalledProcessError as error:
            sys.exit(f"mooncake-kernels: the compiler failed (ninja exit {error.returncode})")
        for built, file in zip((ops, host), wanted, strict=True):
            self.mkpath(str(file.parent))
            self.copy_file(str(built), str(file))  # a new file: processes keep the one they mapped


check_tools()
find_torch()  # fail now, before pip resolves (and downloads) the dependencies
setup(
    ext_modules=[Extension("mooncake_kernels._ops", []), Extension("mooncake_kernels._host", [])],
    cmdclass={"build_ext": BuildExt},
)
