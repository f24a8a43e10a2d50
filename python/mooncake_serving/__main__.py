"""``python -m mooncake_serving demo``: see each command's ``--help``."""

import argparse
import sys

from mooncake_kernels.command_line import run_command

from .demo_options import SUMMARY, add_arguments


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status."""
    return run_command(lambda: run(arguments), extra="demo", errors=(RuntimeError,))


def run(arguments: list[str] | None) -> int:
    """The same, with what it raises."""
    parser = argparse.ArgumentParser(prog="python -m mooncake_serving")
    commands = parser.add_subparsers(dest="command", required=True)
    add_arguments(commands.add_parser("demo", help=SUMMARY, description=SUMMARY))
    options = parser.parse_args(arguments)
    from . import demo  # needs packages of an extra, which --help does not

    return demo.run(options)


if __name__ == "__main__":
    sys.exit(main())
