"""docs/serving/mooncake_compat.md, mooncake_store.md: their code runs, all calls are in tables."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mooncake_serving.compat import mooncake
from tests.pages import blocks_of

SERVING = Path(__file__).parents[2] / "docs/serving"
PAGE = (SERVING / "mooncake_compat.md").read_text()
STORE = (SERVING / "mooncake_store.md").read_text()

USE = """
import importlib.util

assert importlib.util.find_spec("mooncake") and importlib.util.find_spec("mooncake.engine")
mooncake.install()  # idempotent
from mooncake.engine import TransferEngine as Theirs, TransferNotify, TransferOpcode
import mooncake.engine, mooncake.store

assert mooncake.engine.TransferEngine is Theirs is TransferEngine
engine = Theirs()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", "") == 0
assert engine.send_probe(f"127.0.0.1:{engine.get_rpc_port()}") == 0
engine.close()

from mooncake.store import MooncakeDistributedStore as TheirStore, ReplicateConfig

assert TheirStore is MooncakeDistributedStore
"""


def test_documented_code_installs_the_drop_in():
    code = "".join(blocks_of("serving/mooncake_compat") + blocks_of("serving/mooncake_store"))
    command = ["env", "MC_FORCE_TCP=1", sys.executable, "-c", code + USE]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("imported", [(), ("engine",), ("store",)], ids=str)
def test_install_refuses_to_replace_imported_mooncake(imported):
    code = f"""
import sys, types
theirs = sys.modules["mooncake"] = types.ModuleType("mooncake")
for name in {imported}:
    setattr(theirs, name, types.ModuleType("mooncake." + name))
from mooncake_serving.compat import mooncake
from tests.pages import blocks_of
mooncake.install()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "ImportError: install: mooncake must not be imported before" in ran.stderr


def test_documentation_lists_every_engine_call():
    table = PAGE[PAGE.index("## The calls") :]
    named = set(re.findall(r"`(\w+)(?:\(|`)", table))
    calls = {
        name
        for name, _ in inspect.getmembers(mooncake.TransferEngine, inspect.isfunction)
        if not name.startswith("_")
    }
    assert calls <= named, calls - named


def test_documentation_lists_every_store_call():
    named = set(re.findall(r"`(\w+)(?:\(|`)", STORE))
    calls = {
        name
        for name, _ in inspect.getmembers(mooncake.store.MooncakeDistributedStore, callable)
        if not name.startswith("_")
    }
    assert calls <= named, calls - named


def test_documented_error_codes_match():
    for code, name in re.findall(r"(-\d+) `(ERR_\w+)`", PAGE):
        assert getattr(mooncake, name) == int(code)
    assert len(re.findall(r"(-\d+) `(ERR_\w+)`", PAGE)) == 6
    codes = re.findall(r"(-\d+) `([A-Z]+_[A-Z_]+)` \|", STORE)
    assert len(codes) == 10
    for code, name in codes:
        assert getattr(mooncake.store, name) == int(code)
