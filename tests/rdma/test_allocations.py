"""Slices cost no allocation each, in the steady state."""

from pathlib import Path

from ..cxx import CSRC, build, run
from .fake.build import build_verbs

RDMA = [f"rdma/{file.name}" for file in (CSRC / "rdma").glob("*.cc")]
COMMON = ["cuda_context", "cuda_driver", "memory_kind", "numa", "process_id"]
RAIL = [f"transfer/{name}.cc" for name in ("rdma/rail", "memory/nics", "base/limit")]
SOURCES = [*RDMA, *RAIL, *(f"common/{name}.cc" for name in COMMON)]


def test_slices_over_a_rail(tmp_path):
    verbs = build_verbs()
    test = Path(__file__).with_suffix(".cc")
    flags = [str(verbs), f"-Wl,-rpath,{verbs.parent}", "-ldl", "-pthread"]
    result = run(build(test, SOURCES, tmp_path, *flags))
    assert result.returncode == 0, result.stderr
