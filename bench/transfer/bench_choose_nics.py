"""choose_nics and the balancer, on captured machines: what the choice of a NIC costs.

A round is 1,000 calls, so that its microseconds are nanoseconds a call. The first call for a policy
decides for all locations of a machine (`decide`, one call a round, in microseconds); later calls
find it in a dict, which is the baseline. `pick and done` is what the balancer does for a transfer,
compared with the same rule in plain Python; `in _host` is the same without its Python wrapper.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

from lib.harness import Case, arguments
from lib.table import report
from mooncake_kernels.topology import Nic, Topology

MACHINES = Path(__file__).parents[2] / "tests/machines"
NAMES = ("dgx-h100", "hgx-a100-8nic", "gb200")
CALLS = 1_000
NUM_BYTES = 1 << 20


class PythonBalancer:
    """The rule of `Balancer.pick`, in plain Python."""

    def __init__(self, topology: Topology):
        self.tiers = {place: topology.nic_tiers(place) for place in topology.locations}
        self.in_flight = {nic.name: 0 for nic in topology.nics}
        self.gbit_per_s = {nic.name: nic.gbit_per_s for nic in topology.nics}

    def pick(self, location: str, num_bytes: int) -> Nic:
        def until(nic: Nic) -> float:
            return (self.in_flight[nic.name] + num_bytes) / self.gbit_per_s[nic.name]

        nic = min(self.tiers[location][0], key=until)
        self.in_flight[nic.name] += num_bytes
        return nic

    def done(self, nic: Nic, num_bytes: int) -> None:
        self.in_flight[nic.name] -= num_bytes


def decide(name: str, topology: Topology) -> Case:
    def check() -> None:
        assert Topology(topology.system).to_mooncake_json() == topology.to_mooncake_json()

    return Case(
        f"decide, {name}, one call",
        lambda: Topology(topology.system).choose_nics("cpu:0"),
        {},
        check,
    )


def choose(name: str, topology: Topology) -> Case:
    locations = [str(topology.gpus[i % len(topology.gpus)]) for i in range(CALLS)]
    table = {(place, None): topology.choose_nics(place) for place in topology.locations}

    def ours() -> None:
        for location in locations:
            topology.choose_nics(location)

    def baseline() -> None:
        for location in locations:
            table[location, None]

    def check() -> None:
        fresh = Topology(topology.system)
        assert all(table[place, None] == fresh.choose_nics(place) for place in topology.locations)

    return Case(f"choose_nics, {name}, {CALLS} calls", ours, {"a dict": baseline}, check)


def pick(name: str, topology: Topology) -> Case:
    ours, baseline = topology.balancer(), PythonBalancer(topology)

    def run(balancer) -> None:
        for _ in range(CALLS):
            balancer.done(balancer.pick("cuda:0", NUM_BYTES), NUM_BYTES)

    def check() -> None:
        held = [(ours.pick("cuda:0", n), baseline.pick("cuda:0", n), n) for n in (7, 3, 7, 5)]
        assert all(one == other for one, other, _ in held), "wrong: not timed"
        for one, other, n in held:
            ours.done(one, n)
            baseline.done(other, n)

    return Case(
        f"pick and done, {name}, {CALLS} calls",
        lambda: run(ours),
        {"in Python": lambda: run(baseline)},
        check,
    )


def pick_in_host(name: str, topology: Topology) -> Case:
    balancer = topology.balancer()
    place = topology.locations.index("cuda:0")

    def run() -> None:
        pick, done = balancer.native.pick, balancer.native.done
        for _ in range(CALLS):
            done(pick(place, NUM_BYTES), NUM_BYTES)

    def check() -> None:
        assert topology.nics[balancer.native.pick(place, 1)] == topology.choose_nics("cuda:0")[0]
        balancer.done(topology.choose_nics("cuda:0")[0], 1)

    return Case(f"pick and done in _host, {name}, {CALLS} calls", run, {}, check)


def cases() -> Iterator[Case]:
    for make in (decide, choose, pick, pick_in_host):
        for name in NAMES:
            yield make(name, Topology.from_json(MACHINES / f"{name}.json"))


if __name__ == "__main__":
    options = arguments(__doc__, without=("device",))
    report("choose_nics", cases(), options)
