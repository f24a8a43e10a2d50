"""Runs benches that need RDMA NICs on a machine without any: in a guest with soft-RoCE."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import mooncake_kernels as mk

RUNNER = Path(__file__).parents[2] / "tests" / "rdma" / "in_guest"


def leave_unless_nics(
    options: argparse.Namespace,
    num_nics: int,
    *,
    wire_mbit: int | None = None,
    memory_mb: int = 2048,
    timeout_s: int = 900,
) -> None:
    """Go on if there are as many NICs here; otherwise run this bench in a guest, and exit.

    Its times say nothing about real NICs or a real processor; only ratios are worth reading. Its
    NICs share that processor, unless ``wire_mbit``, what each may send a second, is less than that.
    """
    if len(mk.rdma.devices()) >= num_nics:
        return
    prepared = subprocess.run([RUNNER, "--prepare"], capture_output=True, text=True)
    if prepared.returncode:
        sys.stdout.write(f"left out: no RDMA NIC, and no guest: {prepared.stderr}")
        sys.exit(0)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        words = sys.argv[1:]
        if options.json:
            words += ["--json", str(results)]  # of two the last counts
        guest = [RUNNER, "--nics", str(num_nics), "--mem", str(memory_mb), "--rw", folder]
        guest += ["--wire", str(wire_mbit)] if wire_mbit else []
        command = [sys.executable, str(Path(sys.argv[0]).resolve()), *words]
        done = subprocess.run([*guest, "--timeout", str(timeout_s), "--", *command])
        if options.json and results.exists():
            options.json.write_bytes(results.read_bytes())
    sys.exit(done.returncode)


def limit_wire(nic: str, mbit: int) -> None:
    """In a guest whose wires are limited: what one of its NICs may send a second from now on."""
    wire = f"wire{nic.removeprefix('rxe')}"
    rate = f"rate {mbit}mbit burst 64kb limit 64mb"  # tests/rdma/vm/wire.py says why
    subprocess.run(["tc", *f"qdisc change dev {wire} root tbf {rate}".split()], check=True)
