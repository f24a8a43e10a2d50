"""Runs benches that need RDMA NICs on a machine without any: in a guest with soft-RoCE."""

import subprocess
import sys
import tempfile
from pathlib import Path

import mooncake_kernels as mk

RUNNER = Path(__file__).parent.parent / "tests" / "rdma" / "in_guest"


def leave_unless_nics(
    num_nics: int, *, wire_mbit: int | None = None, memory_mb: int = 2048, timeout_s: int = 900
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
    words = sys.argv[1:]
    target = Path(words[words.index("--json") + 1]) if "--json" in words else None
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        if target:
            words[words.index("--json") + 1] = str(results)
        guest = [RUNNER, "--nics", str(num_nics), "--mem", str(memory_mb), "--rw", folder]
        guest += ["--wire", str(wire_mbit)] if wire_mbit else []
        command = [sys.executable, sys.argv[0], *words]
        done = subprocess.run([*guest, "--timeout", str(timeout_s), "--", *command])
        if target and results.exists():
            target.write_bytes(results.read_bytes())
    sys.exit(done.returncode)
