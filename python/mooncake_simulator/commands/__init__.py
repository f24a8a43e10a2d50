"""The commands of ``python -m mooncake_simulator``, one per file."""

from typing import Any

from . import hit_rate, reproduce, run, trace


def add_commands(commands: Any) -> None:
    """Declare all commands on argparse's subparsers."""
    for module in (hit_rate, run, trace, reproduce):
        module.add_commands(commands)


__all__ = ["add_commands"]
