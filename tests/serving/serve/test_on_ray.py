"""``serve up --cluster ray``, on two nodes of Ray that are processes of this machine."""

import os
import signal
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.serving.serve.support import WAIT_S, Up
from tests.waiting import eventually

pytest.importorskip("ray", reason="ray is not installed: make test-ray")

from ray.cluster_utils import Cluster

HOSTS = ("127.0.0.2", "127.0.0.3")
# How soon a lost node is noticed; and engines compute although others do, too.
SYSTEM = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 200,
    "worker_niceness": 0,
}


@pytest.fixture
def nodes():
    """The head, which serves here, and another node; each has room for both engines."""
    small = {"num_cpus": 2, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**small, "node_ip_address": HOSTS[0], "_system_config": SYSTEM},
    )
    try:
        cluster.add_node(**small, node_ip_address=HOSTS[1])
        yield cluster
    finally:
        cluster.shutdown()


def pids_of(*words: str) -> list[int]:
    """The processes whose command lines have these words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if all(word.encode() in line for word in words):
            found.append(int(path.parent.name))
    return found


def test_engines_on_two_nodes(nodes, tiny_folder, tmp_path, expected):
    up = Up(tiny_folder, tmp_path, "--cluster=ray", f"--ray-address={nodes.address}")
    text = expected("the end", 10)[0]
    model = f"--model={tiny_folder}"

    def places() -> dict[str, str]:
        try:
            told = up.client.get("/instances").json()["instances"]
        except httpx.TransportError:
            return {}
        return {one["name"]: one["url"] for one in told if one["up"]}

    def answers() -> bool:
        try:
            answer = up.complete("the end")
        except httpx.TransportError:  # of the router
            return False
        assert answer.status_code != 200 or answer.json()["choices"][0]["text"] == text
        return answer.status_code == 200

    try:
        first = places()
        assert {urlsplit(url).hostname for url in first.values()} == set(HOSTS)
        assert answers()

        [other] = nodes.worker_nodes
        (kept, lost) = sorted(first, key=lambda name: urlsplit(first[name]).hostname)
        [pid] = pids_of(model, f"--role={kept.partition('-')[0]}")
        os.kill(pid, signal.SIGKILL)
        os.kill(up.pid_of("router"), signal.SIGKILL)  # which knew where they are
        nodes.remove_node(other, allow_graceful=False)
        for told in (
            f"{kept} was killed by signal 9: restarted in",
            "router was killed by signal 9: restarted in",
            f"{lost} was lost with its actor",
        ):
            eventually(lambda told=told: told in up.err.read_text())
        eventually(lambda: len(places()) == 2 and answers())
        assert not set(places().values()) & set(first.values())
        assert {urlsplit(url).hostname for url in places().values()} == {HOSTS[0]}
        assert len(pids_of(model, "--block-size=8")) == 3  # two engines, and who started them
    finally:
        up.client.close()
        up.process.send_signal(signal.SIGINT)
        status = up.process.wait(WAIT_S)
    assert status == 0 and "Traceback" not in up.err.read_text()
    eventually(lambda: not pids_of(model))
    assert nodes.head_node.remaining_processes_alive(), "it has ended a cluster of others"
