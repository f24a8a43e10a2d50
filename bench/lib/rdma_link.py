"""Two engines over RDMA NICs of this machine, and what their benches print."""

import dataclasses
import statistics
import sys
import time
from typing import Any

import numpy as np

import mooncake_kernels as mk
from lib.harness import spread

BLOCK = 16 << 10


class Link:
    """An engine over some NICs, and one over others, with memory on both."""

    def __init__(self, near: list[str], far: list[str], num_bytes: int):
        self.near = near
        self.num_bytes = num_bytes
        self.engines = [
            mk.TransferEngine(transports=["rdma"], topology=topology_of(nics))
            for nics in (near, far)
        ]
        self.memory = [np.zeros(num_bytes, np.uint8) for _ in self.engines]
        regions = zip(self.engines, self.memory, strict=True)
        here, there = (engine.register(memory).address for engine, memory in regions)
        self.peer = self.engines[0].open(self.engines[1].name)
        order = np.random.default_rng(0).permutation(num_bytes // BLOCK)
        self.columns = {
            "contiguous": ([here], [there], [num_bytes]),
            "scattered": (
                here + BLOCK * np.arange(len(order)),
                there + BLOCK * order,
                BLOCK,
            ),
        }

    def move(self, verb: str, shape: str) -> float:
        """GB/s of one request."""
        call = getattr(self.engines[0], f"{verb}_blocks")
        start = time.perf_counter()
        call(self.peer, *self.columns[shape], deadline_s=300).wait()
        return self.num_bytes / (time.perf_counter() - start) / 1e9

    def moved(self, verb: str) -> list[int]:
        """Bytes that each NIC of the near side has moved so far."""
        paths = self.engines[0].stats()["paths"][self.engines[1].name]
        field = "num_bytes_written" if verb == "write" else "num_bytes_read"
        return [paths[name][field] for name in self.near]

    def check(self, verb: str) -> None:
        source, target = self.memory if verb == "write" else self.memory[::-1]
        source[:] = np.random.default_rng(1).integers(0, 256, self.num_bytes, np.uint8)
        self.move(verb, "contiguous")
        assert (source == target).all(), "wrong: not timed"

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def topology_of(names: list[str]) -> mk.Topology:
    system = mk.Topology.discover().system
    nics = tuple(nic for nic in system.nics if nic.name in names)
    return mk.Topology(dataclasses.replace(system, nics=nics))


def row(case: str, baseline: str, rounds: list[tuple[float, float]]) -> dict[str, Any]:
    ratio, quartiles = spread([a / b for a, b in rounds])
    return {
        "case": case,
        "gb_per_s": statistics.median(a for a, _ in rounds),
        f"gb_per_s_{baseline}": statistics.median(b for _, b in rounds),
        f"x_{baseline}": ratio,
        f"x_{baseline}_quartiles": quartiles,
        "rounds": len(rounds),
    }


def say(found: dict[str, Any], baseline: str) -> None:
    low, high = found[f"x_{baseline}_quartiles"]
    ratio = f"{found[f'x_{baseline}']:.2f}x {baseline} [{low:.2f}, {high:.2f}]"
    value = f"{found['gb_per_s']:8.4f} GB/s" if "gb_per_s" in found else f"{found['us']:8.1f} us"
    sys.stdout.write(f"{found['case']:40} {value}   {ratio}\n")
    sys.stdout.flush()
