"""``python -m mooncake_serving demo``: see each command's ``--help``."""

import argparse
import sys

from . import demo


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m mooncake_serving")
    commands = parser.add_subparsers(dest="command", required=True)
    demo.add_arguments(commands.add_parser("demo", help=demo.SUMMARY, description=demo.SUMMARY))
    return demo.run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
