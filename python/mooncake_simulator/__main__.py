"""``python -m mooncake_simulator hit-rate | run | trace | fast25-fig1 | ...``"""

import argparse
import os
import select
import sys

from .commands import add_commands


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status: 0, 1 if packages are missing, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m mooncake_simulator",
        description="Replay traces on simulated clusters, and reproduce what papers report.",
    )
    add_commands(parser.add_subparsers(dest="command", required=True, metavar="COMMAND"))
    if sys.stdout is None:  # closed by who started this: what is written is lost
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    options = parser.parse_args(arguments)
    try:  # as mooncake_kernels.command_line, whose import takes torch's seconds
        options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130  # as a shell reports SIGINT
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("mooncake"):
            raise
        package = missing.name.partition(".")[0]
        sys.stderr.write(
            f"error: {package} is not installed: pip install 'mooncake-kernels[simulator]'\n"
        )
        return 1
    except (ValueError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            # The interpreter's final flush shall be silent.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _reader_is_gone() -> bool:
    """Whether no one reads the output: it may be a file to write, a pipe, that broke."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return bool(output.poll(0))


if __name__ == "__main__":
    sys.exit(main())
