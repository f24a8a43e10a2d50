"""The example of examples/ writes through a NIC."""

import subprocess
import sys

from tests.pages import ROOT


def test_the_example_writes_through_a_nic():
    command = [sys.executable, ROOT / "examples/rdma.py"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0 and "4,096 bytes were written" in ran.stdout, ran.stderr
