"""``mooncake-store serve | stat | top | list | get | put | remove | drain | bench``."""

import argparse
import sys
from typing import NoReturn

from mooncake_kernels.command_line import run_command

from .options import Failed

EPILOG = """\
exit status: 0 done; 1 not done, and why; 2 wrong arguments, files or servers

examples:
  mooncake-store serve /dev/shm/kv --capacity 64GiB --port 9410
  mooncake-store put /dev/shm/kv greeting hello.txt
  mooncake-store get /dev/shm/kv greeting | less
  mooncake-store top /dev/shm/kv
"""


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit status."""
    options = make_parser().parse_args(arguments)
    return run_command(lambda: _run(options), extra="store", errors=(RuntimeError,))


def _run(options: argparse.Namespace) -> int:
    try:
        options.run(options)
    except Failed as failed:
        sys.stderr.write(f"error: {failed}\n")
        return 1
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Declare all commands."""
    from . import bench, drain, objects, serve, stat

    parser = _Parser(
        prog="mooncake-store",
        description="Serve, look at and use a store of KV objects on this host.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (serve, stat, objects, drain, bench):
        module.add_commands(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """Points to the help in its errors."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")
