"""Tests that run where an engine is installed, by that environment's own pytest."""

import os
from pathlib import Path

import pytest

from tests.metadata.support import RedisServer
from tests.progress import run_to_its_end

ROOT = Path(__file__).parents[3]
FOLDER = Path(__file__).with_name("in_engines")


@pytest.fixture
def server(tmp_path):
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.mark.parametrize(
    "environment, needed, file",
    [
        ("MK_TEST_VLLM", "vLLM: see `make test-vllm`", "test_vllm_tier.py"),
        ("MK_TEST_VLLM", "vLLM: see `make test-vllm`", "test_vllm_copies.py"),
        ("MK_TEST_ENGINES", "SGLang: see make_engines", "test_sglang_hicache.py"),
        ("MK_TEST_ENGINES", "SGLang: see make_engines", "test_sglang_pools.py"),
        ("MK_TEST_ENGINES", "SGLang: see make_engines", "test_sglang_tree.py"),
        ("MK_TEST_ENGINES", "SGLang: see make_engines", "test_sglang_copies.py"),
        ("MK_TEST_ENGINES", "SGLang: see make_engines", "test_sglang_router.py"),
        ("MK_TEST_ENGINES", "LMCache: see make_engines", "test_lmcache_l2.py"),
    ],
)
def test_connector_works_with_the_engines_own_classes(environment, needed, file, server):
    python = os.environ.get(environment)
    if not python:
        pytest.skip(f"{environment} names no Python that has {needed}")
    paths = os.pathsep.join([str(ROOT / "python"), str(ROOT)])
    given = {"PYTHONPATH": paths, "MK_TEST_REDIS": server.url, "OMP_NUM_THREADS": "1"}
    command = [
        python,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--noconftest",
        FOLDER / file,
    ]
    done = run_to_its_end(command, os.environ | given)
    # An environment without the engine has no tests, which is another status.
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
