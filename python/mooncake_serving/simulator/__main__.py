"""``python -m mooncake_serving.simulator hit-rate | run | trace | fast25-fig1 | ...``"""

import argparse
import os
import sys

from .commands import add_commands


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status: 0, 1 if packages are missing, 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m mooncake_serving.simulator",
        description="Replay traces on simulated clusters, and reproduce what papers report.",
    )
    add_commands(parser.add_subparsers(dest="command", required=True, metavar="COMMAND"))
    options = parser.parse_args(arguments)
    try:  # as mooncake_kernels.command_line, whose import takes torch's seconds
        options.run(options)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130  # as a shell reports SIGINT
    except BrokenPipeError:  # the reader is gone: keep the interpreter's final flush silent
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("mooncake"):
            raise
        package = missing.name.partition(".")[0]
        sys.stderr.write(
            f"error: {package} is not installed: pip install 'mooncake-kernels[simulator]'\n"
        )
        return 1
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
