"""``python -m mooncake_kernels doctor | config | calibrate``."""

import argparse
import importlib.metadata
import sys
from pathlib import Path

from . import config


def doctor() -> list[tuple[str, bool, str]]:
    """Return (what, whether it is here, version or reason) of all that the package can use."""
    import torch

    from . import _host, _library

    built_for = f"torch was built for CUDA {torch.version.cuda}"
    rows = [
        ("operators", True, f"_ops.so under torch {torch.__version__}"),
        ("CUDA kernels", _library.has_cuda,
         "compiled in" if _library.has_cuda else "_ops.so was built without nvcc"),
        ("torch CUDA", torch.cuda.is_available(),
         built_for if torch.version.cuda else "torch was built for the CPU alone"),
    ]  # fmt: skip
    for name, reason in (
        ("CUDA driver", _host.missing_cuda_driver()),
        ("libibverbs", _host.missing_verbs()),
    ):
        rows.append((name, not reason, reason or "loads"))
    for package in ("triton", "gguf", "tokenizers", "safetensors"):
        try:
            rows.append((package, True, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((package, False, "not installed"))
    return rows


def calibrate(path: Path, *, quick: bool) -> None:
    """Measure the calibration table of this machine, line by line, and write it."""
    from .kv.calibrate import measure, write

    table = measure(quick=quick, report=lambda line: sys.stdout.write(line + "\n"))
    write(table, path)
    sys.stdout.write(f"written to {path}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m mooncake_kernels")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="say what is here, and why what is not is not")
    commands.add_parser("config", help="list the environment variables, as a Markdown table")
    measuring = commands.add_parser("calibrate", help='measure by what engine "auto" chooses')
    measuring.add_argument("--json", type=Path, help='the table; where "auto" looks if not given')
    measuring.add_argument("--quick", action="store_true", help="few sizes and few rounds")
    options = parser.parse_args(arguments)
    command = options.command
    if command == "calibrate":
        default = config.current().calibration or config.Settings.calibration
        calibrate(options.json or Path(default).expanduser(), quick=options.quick)
        return 0
    if command == "config":
        lines = ["| variable | default | meaning |", "|---|---|---|"]
        lines += [f"| `{name}` | {default} | {doc} |" for name, default, doc in config.table()]
    else:
        lines = [f"{'yes' if here else 'no':4}{what:14}{detail}" for what, here, detail in doctor()]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
