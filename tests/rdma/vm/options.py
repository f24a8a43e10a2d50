"""The command line of in_guest."""

import argparse
import os
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[3]


def at_least(least: int):
    """Parse an integer that must not be less."""

    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return parse


def parse(arguments: list[str], description: str) -> argparse.Namespace:
    """Return the options, and the words after ``--`` as ``command``."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="in_guest",
        usage="in_guest [options] -- COMMAND [ARGUMENT...]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    cache = Path(os.environ.get("MK_GUEST_CACHE", ROOT / "build" / "guest"))
    add("--nics", type=at_least(0), default=2, help="NICs eth0.. with rxe0.. on them [2]")
    add("--wire", type=at_least(1), metavar="MBIT", help="what a NIC sends a second, at most")
    add("--numa", action="store_true", help="two NUMA nodes, each with half of the NICs")
    add("--gpu", action="store_true", help="a display adapter with a 64 MiB BAR beside NIC 0")
    add("--rw", type=Path, metavar="DIR", help="folder that can be written, at the same path")
    add("--timeout", type=at_least(1), default=600, metavar="S", help="seconds to live [600]")
    add("--smp", type=at_least(1), default=2, metavar="N", help="processors [2]")
    add("--mem", type=at_least(256), default=2048, metavar="MB", help="memory [2048]")
    add("--kernel", type=Path, metavar="DIR", help="an unpacked kernel package, not Debian's own")
    add("--qemu", action="append", type=shlex.split, default=[], help="more words for qemu")
    add("--cache", type=Path, default=cache, help="what is fetched once [build/guest]")
    add("--prepare", action="store_true", help="only check and fetch what a guest needs")
    add(
        "-v", "--verbose", action="store_true", help="print the guest's log and the time at the end"
    )
    options = parser.parse_args(arguments[:split])
    options.cache = options.cache.resolve()
    options.command = arguments[split + 1 :]
    options.qemu = [word for words in options.qemu for word in words]
    if options.numa and options.smp < 2:
        parser.error("--numa needs --smp 2 or more")
    if not options.command and not options.prepare:
        parser.error("no command: it stands behind --")
    return options
