"""The engine over NICs, beside perftest between the first two, in turn; and over two a side.

One request at a time: 32 MiB in one range, and as scattered blocks of 16 KiB. perftest keeps 128
messages of 1 MiB in flight and polls without a pause; ours sleeps. Both ends are on this machine.
Without RDMA NICs it runs in a guest with soft-RoCE, whose processor is emulated: that, not a NIC,
is what two NICs then share.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from typing import Any

import in_guest
import numpy as np
import perftest
from harness import arguments, spread
from perftest import in_turn
from table import heading, save

import mooncake_kernels as mk

MIB = 1 << 20
BLOCK = 16 << 10


class Link:
    """An engine over some NICs, and one over others, with memory on both."""

    def __init__(self, near: list[str], far: list[str], num_bytes: int):
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
    sys.stdout.write(f"{found['case']:32} {found['gb_per_s']:8.4f} GB/s   {ratio}\n")
    sys.stdout.flush()


def cases(names: list[str], options: argparse.Namespace) -> Any:
    num_bytes = (8 if options.quick else 32) * MIB
    one = Link(names[:1], names[1:2], num_bytes)
    for verb in ("write", "read"):
        one.check(verb)
        for shape in ("contiguous", "scattered"):
            rounds = in_turn(
                lambda verb=verb, shape=shape: one.move(verb, shape),
                lambda verb=verb: perftest.gb_per_s(verb, names, MIB, num_bytes // MIB),
                options,
            )
            yield row(f"{verb}, {shape}", "perftest", rounds), "perftest"
    if len(names) >= 4:
        two = Link([names[0], names[2]], [names[1], names[3]], num_bytes)
        for verb in ("write", "read"):
            two.check(verb)
            rounds = in_turn(
                lambda verb=verb: two.move(verb, "scattered"),
                lambda verb=verb: one.move(verb, "scattered"),
                options,
            )
            yield row(f"{verb}, scattered, two NICs a side", "one", rounds), "one"
        two.close()
    one.close()


def main() -> None:
    options = arguments(__doc__)
    options.device = "cpu"
    in_guest.leave_unless_nics(4)
    names = [device.name for device in mk.rdma.devices()[:4]]
    head, rows = heading("transfer_rdma", options), []
    head["nics"] = "soft-RoCE in a QEMU guest" if names[0].startswith("rxe") else names
    for found, baseline in cases(names, options):
        rows.append(found)
        say(found, baseline)
        save(head, rows, options)


if __name__ == "__main__":
    main()
