"""The way of one call: the Python functions it enters, their files, and the changes of file.

Of one object of 64 KiB in a cluster of two hosts over tcp (with Redis as its directory), of one
write of a `TransferEngine`, and of one copy: functions of this project that the calling thread
enters, by `sys.setprofile`, and those of other packages. Each call is made twice, and the second is
traced. No times.
"""

import argparse
import itertools
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

import mooncake_kernels as mk
import mooncake_serving
from baselines.store import running
from lib.harness import arguments
from lib.processes import free_port
from lib.table import heading, save
from mooncake_serving.store import ClusterStore, Node, Store, directory

ROOTS = tuple(str(Path(package.__file__).parent) for package in (mk, mooncake_serving))
NUM_BYTES = 64 << 10


class Trace:
    """The functions that one call enters.

    Attributes:
        steps: (file, function) of this project's, in order.
        others: how many of other packages.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[str, str]] = []
        self.others = 0

    def of(self, call: Callable[[], Any]) -> "Trace":
        sys.setprofile(self._note)
        try:
            call()
        finally:
            sys.setprofile(None)
        return self

    def row(self) -> dict[str, int]:
        files = [file for file, _ in self.steps]
        changes = sum(a != b for a, b in itertools.pairwise(files))
        return {
            "calls": len(files), "files": len(set(files)), "changes": changes, "others": self.others
        }  # fmt: skip

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(ROOTS):
            self.steps.append((code.co_filename, getattr(code, "co_qualname", code.co_name)))
        elif frame.f_back is not None and frame.f_back.f_code is not self.of.__code__:
            self.others += 1


class Host:
    """A pool, an engine and a node of one host."""

    def __init__(self, url: str, name: str):
        self.directory = directory.connect(url)
        self.engine = mk.TransferEngine(transports=["tcp"])
        self.store = Store.create(64 << 20, namespace="bench")
        self.node = Node(self.store, self.engine, self.directory, host=name)
        self.cluster = ClusterStore(self.node)

    def close(self) -> None:
        self.cluster.close()
        self.engine.close()
        self.store.close()
        self.directory.close()


def of_cluster(url: str, trace: Callable[[str, Callable[[int], Any]], None]) -> None:
    value = np.random.default_rng(1).bytes(NUM_BYTES)
    buffer = memoryview(bytearray(NUM_BYTES))
    one, other = Host(url, "one"), Host(url, "other")
    for host in (one, other):
        host.cluster.register(buffer)
    trace("put, own pool", lambda i: one.cluster.put_from(f"one/{i}", value))
    trace("get, own pool", lambda i: one.cluster.get_into(f"one/{i}", buffer))
    trace("get, another host's", lambda i: other.cluster.get_into(f"one/{i}", buffer))
    assert bytes(buffer) == value
    trace("remove, own pool", lambda i: one.cluster.remove(f"one/{i}"))
    for i in range(2):
        one.cluster.put_from(f"two/{i}", value)
    trace("remove, another host's", lambda i: other.cluster.remove(f"two/{i}"))
    one.close()
    other.close()


def of_transfer(trace: Callable[[str, Callable[[int], Any]], None]) -> None:
    source, target = (torch.zeros(NUM_BYTES, dtype=torch.uint8) for _ in range(2))
    with mk.TransferEngine(transports=["tcp"]) as one, mk.TransferEngine(transports=["tcp"]) as two:
        local, remote = one.register(source), two.register(target)
        peer = one.open(two.name)
        blocks = torch.tensor([[local.address, remote.address, NUM_BYTES]])
        trace("TransferEngine.write, tensor", lambda _: one.write(peer, blocks).wait())


def of_copies(trace: Callable[[str, Callable[[int], Any]], None]) -> None:
    views = [mk.KVView(torch.zeros(64, 16, 8, 64), "block token head dim") for _ in range(2)]
    plan = mk.CopyPlan(*views)
    ids = torch.arange(8)
    trace("CopyPlan.run, tensors", lambda _: plan.run(ids, ids + 0))
    trace("CopyPlan.run, lists", lambda _: plan.run([1, 2, 3], [4, 5, 6]))
    trace("gather_blocks", lambda _: mk.gather_blocks(views[0], ids))


def main() -> None:
    options = arguments(__doc__, extend, ("device", "seconds"))
    head, rows = heading("call_paths", options), []

    def trace(case: str, call: Callable[[int], Any]) -> None:
        call(0)
        traced = Trace().of(lambda: call(1))
        row = {"case": case, **traced.row()}
        rows.append(row)
        sys.stdout.write(
            f"{case:30} {row['calls']:4} calls  {row['files']:3} files  {row['changes']:4} changes"
            f"  {row['others']:4} of other packages\n"
        )
        for file, function in traced.steps if options.steps else ():
            sys.stdout.write(f"    {file.removeprefix(str(Path(ROOTS[0]).parent))} {function}\n")
        save(head, rows, options)

    of_copies(trace)
    of_transfer(trace)
    server = shutil.which("redis-server")
    if server is None:
        sys.stdout.write("a cluster's calls are left out: no redis-server\n")
        return
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            server,
            "--port",
            str(port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            folder,
        ]
        with running(command, port):
            of_cluster(f"redis://127.0.0.1:{port}/0", trace)


def extend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", action="store_true", help="print each function, too")


if __name__ == "__main__":
    main()
