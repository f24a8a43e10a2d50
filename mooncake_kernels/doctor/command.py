"""``python -m mooncake_kernels doctor``: its options and exit status."""

import argparse
import os
import sys

from .._machine_root import MachineRoot
from .examine import CHECKS_OF, examine
from .finding import State
from .here import Here
from .inspect import inspect
from .report import as_json, table


def run(root: str | None, only: str | None, *, as_objects: bool) -> int:
    """Examine a machine and print the findings.

    Args:
        root: a captured machine's files; None for this one, whose libraries are checked too.
        only: names of groups and checks, separated by commas; None for all.
        as_objects: print JSON.

    Returns:
        the exit status: 0 if there is no problem, 1 if there is one.

    Raises:
        argparse.ArgumentTypeError: a wrong option; the message names it and the value.
    """
    names = _names(only)
    if root is not None and not os.path.isdir(root):  # Path("") would be the current folder
        raise argparse.ArgumentTypeError(f"--root must be a folder, got {root!r}")
    machine = MachineRoot() if root is None else MachineRoot(root)
    findings = examine(machine, inspect() if root is None else Here(), names)
    sys.stdout.write(as_json(findings) + "\n" if as_objects else table(findings))
    return int(any(finding.state is State.PROBLEM for finding in findings))


def _names(only: str | None) -> frozenset[str]:
    if only is None:
        return frozenset()
    known = [name for group, checks in CHECKS_OF.items() for name in (group, *checks)]
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in known:
            listed = ", ".join(dict.fromkeys(known))
            raise argparse.ArgumentTypeError(f"--only must be of {listed}, got {name!r}")
    return frozenset(names)
