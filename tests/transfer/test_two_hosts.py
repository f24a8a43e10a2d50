"""The tests of two_hosts/ pass where a process can have its own networks.

Here in a separate network namespace; those of netem in the guest of tests/rdma, whose kernel has
that qdisc.
"""

import os
import re
import shutil
import subprocess
import sys

import pytest

from ..rdma.conftest import IN_GUEST, ROOT, guest_files  # noqa: F401

OWN_NETWORK = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "-r", "--net"]
LIMIT_S = 600  # of a world: it takes a minute
NEEDED = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "ss": "iproute2"}


@pytest.fixture(scope="module")
def own_network() -> list[str]:
    """The words that give a command a network of its own; skips if there can be none."""
    missing = [package for program, package in NEEDED.items() if not shutil.which(program)]
    if missing:
        pytest.skip(f"apt-get install {' '.join(dict.fromkeys(missing))}")
    veth = ["ip", "link", "add", "wire", "type", "veth", "peer", "name", "other"]
    done = subprocess.run([*OWN_NETWORK, *veth], text=True, capture_output=True)
    if done.returncode:
        pytest.skip(f"no network namespace or veth pair: {done.stderr.strip()}")
    return OWN_NETWORK


def run(world: list, *tests: str, folder: str = "tests/transfer/two_hosts") -> None:
    without = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest", "--durations=3", "-rs"]
    pytest_there = [sys.executable, "-m", "pytest", *without, *(f"{folder}/{t}" for t in tests)]
    done = subprocess.run(
        [*world, "env", "MK_TEST_WORLD=two_hosts", *pytest_there],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    if done.returncode:
        pytest.fail(f"exit status {done.returncode}\n{done.stdout}{done.stderr}", pytrace=False)
    assert re.search(r"\d+ passed", done.stdout)


def test_two_hosts(own_network):
    run(own_network, "test_cable.py", "test_outages.py", "test_relay.py", "test_zero_copy.py")


def test_two_hosts_with_a_lossy_link(guest_files):  # noqa: F811
    guest = [IN_GUEST, "--nics", "0", "--timeout", str(LIMIT_S - 60), "--"]
    run([*guest, *OWN_NETWORK[:1], "--net"], "test_netem.py")
