"""``python -m mooncake_serving demo``: see each command's ``--help``."""

import argparse
import sys

from mooncake_kernels.command_line import run_command


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status."""
    return run_command(lambda: run(arguments), extra="demo")


def run(arguments: list[str] | None) -> int:
    """The same, with what it raises."""
    from . import demo  # needs packages of an extra

    parser = argparse.ArgumentParser(prog="python -m mooncake_serving")
    commands = parser.add_subparsers(dest="command", required=True)
    demo.add_arguments(commands.add_parser("demo", help=demo.SUMMARY, description=demo.SUMMARY))
    return demo.run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
