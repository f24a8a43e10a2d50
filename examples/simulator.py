"""Replay a trace on a simulated cluster: 4 prefill and 4 decode instances, two policies."""

import tempfile
from pathlib import Path

from mooncake_serving.conductor import KVCacheCentric, Random
from mooncake_simulator import (
    Disaggregated,
    DisaggregatedOptions,
    conductor_of,
    read_trace,
)
from mooncake_simulator.traces import TraceProfile, synth_trace, write_mooncake

PROFILE = Path(__file__).parents[1] / "tests/simulator/conversation.profile.json"

with tempfile.TemporaryDirectory() as folder:
    path = Path(
        folder, "trace.jsonl"
    )  # Mooncake's format; read_trace also reads Azure's, BurstGPT's
    write_mooncake(synth_trace(TraceProfile.load(PROFILE), 400), path)
    trace = read_trace(path)

for policy in (Random(), KVCacheCentric()):
    options = DisaggregatedOptions(num_prefill=4, num_decode=4)
    report = Disaggregated(options, conductor_of(options, policy=policy)).run(trace)
    summary = report.summary()
    met = report.num_effective(ttft_s=30, tbt_s=0.1)
    ttft = f"TTFT {summary['ttft_mean_s']:.2f} s"
    print(f"{type(policy).__name__}: {ttft}, {met} of {len(trace)} requests in time")
