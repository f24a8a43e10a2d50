"""``mooncake-store serve | stat | top | list | get | put | remove | drain | bench``."""

import argparse
import os
import sys
from typing import Any, NoReturn

from .failure import Failed

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
    try:
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
        return _say(f"{package} is not installed: pip install 'mooncake-kernels[store]'", 2)
    except Failed as failed:
        return _say(str(failed), 1)
    except (ValueError, OSError, RuntimeError) as error:
        return _say(str(error), 2)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Declare all commands."""
    from . import bench, drain, objects, serve, stat, top

    parser = _Parser(
        prog="mooncake-store",
        description="Serve, look at and use a store of KV objects on this host.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (serve, stat, top, objects, drain, bench):
        module.add_commands(commands)
    return parser


class _Parser(argparse.ArgumentParser):
    """Points to the help in its errors."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def _say(message: Any, status: int) -> int:
    sys.stderr.write(f"error: {message}\n")
    return status
