"""The simulator: a trace on 16 nodes under the conductor, on one core.

`--trace` is Mooncake's conversation trace (12,031 requests in an hour); without it as many requests
are generated from the profile of the tests. The replay is that of `hit-rate`: one LRU pool, 3
million tokens.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

from lib.harness import Case, arguments
from lib.table import report
from mooncake_simulator import (
    CoupledCluster,
    CoupledClusterOptions,
    Disaggregated,
    DisaggregatedOptions,
    Report,
    conductor_of,
)
from mooncake_simulator.hit_rate import replay
from mooncake_simulator.traces import TraceProfile, TraceRequest, read_trace, synth_trace

PROFILE = Path(__file__).parents[2] / "tests/simulator/conversation.profile.json"
NUM_REQUESTS = 12_031


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", help="Mooncake's JSON lines")


def disaggregated(trace: list[TraceRequest]) -> Report:
    options = DisaggregatedOptions()
    return Disaggregated(options, conductor_of(options)).run(trace)


def coupled(trace: list[TraceRequest]) -> Report:
    return CoupledCluster(CoupledClusterOptions()).run(trace)


def cases(options: argparse.Namespace) -> Iterator[Case]:
    if options.trace is not None:
        trace = list(read_trace(options.trace))
    else:
        trace = synth_trace(TraceProfile.load(PROFILE), NUM_REQUESTS)
    if options.quick:
        trace = trace[:500]
    fields = {"requests": len(trace), "trace": "given" if options.trace else "made up"}
    for name, simulate in (("8P + 8D", disaggregated), ("16 coupled", coupled)):

        def check(simulate=simulate) -> None:
            jobs = simulate(trace).jobs
            assert len(jobs) == len(trace) and all(job.finished_s is not None for job in jobs)

        yield Case(
            f"{len(trace)} requests on {name}",
            lambda simulate=simulate: simulate(trace),
            {},
            check,
            fields=fields,
        )

    def check_replay() -> None:
        assert 0 < replay(trace, 3e6).hit_rate < 1

    yield Case(f"{len(trace)} requests, LRU", lambda: replay(trace, 3e6), {}, check_replay)


if __name__ == "__main__":
    chosen = arguments(__doc__, add_options, without=("device",))
    report("simulator", cases(chosen), chosen)
