"""``python -m mooncake_kernels topo``: which NIC is near which GPU, and why."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from ..errors import InvalidArgument, Unavailable
from .topology import Topology


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command ``topo``."""
    parser = commands.add_parser("topo", help="show GPUs, NICs and the paths between them")
    parser.add_argument(
        "--probe",
        action="store_true",
        help="write to memory with each NIC first, and mark failures",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--root", default="/", help="folder with the machine's sys and proc")
    source.add_argument("--xml", type=Path, help="NCCL's XML instead")
    source.add_argument("--from-json", type=Path, help="a saved topology instead")
    show = parser.add_mutually_exclusive_group()
    show.add_argument("--tree", action="store_true", help="the PCI tree")
    show.add_argument("--json", action="store_true", help="all of it, to be read again")
    show.add_argument("--mooncake", action="store_true", help="Mooncake's priority matrix")
    show.add_argument("--explain", metavar="LOCATION", help="why which NIC, for cuda:0 or cpu:0")
    show.add_argument("--svg", type=Path, metavar="FILE", help="draw it into a file")


def run(options: argparse.Namespace, probe: Callable[[Topology], object]) -> int:
    """Print what was requested, after ``probe`` if requested; return the exit status."""
    try:
        if options.probe and (options.xml or options.from_json or options.root != "/"):
            raise InvalidArgument("topo: --probe must be of this machine, not of another's files")
        topology = _topology(options)
        if options.probe:
            probe(topology)
        text = _text(topology, options)
    except (InvalidArgument, Unavailable, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    _write(text)
    return 0


def _write(text: str) -> None:
    """Print text, with question marks for characters the output cannot encode."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))


def _topology(options: argparse.Namespace) -> Topology:
    if options.xml is not None:
        return Topology.from_nccl_xml(options.xml)
    if options.from_json is not None:
        return Topology.from_json(options.from_json)
    return Topology.discover(options.root)


def _text(topology: Topology, options: argparse.Namespace) -> str:
    if options.tree:
        return topology.tree()
    if options.json:
        return topology.to_json()
    if options.mooncake:
        return topology.to_mooncake_json()
    if options.explain is not None:
        return topology.explain(options.explain) + "\n"
    if options.svg is not None:
        options.svg.write_text(topology.to_svg(), encoding="utf-8")
        return f"written to {options.svg}\n"
    return topology.matrix()
