"""Our connectors under a name of their own, in vLLM's registry: in a stand-in for it, and, where
MK_TEST_VLLM names a Python that has vLLM, in vLLM's.
"""

import importlib
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from mooncake_serving.connectors import vllm_plugin

ROOT = Path(__file__).parents[3]
NAME = "MooncakeKernelsConnector"


class Factory:
    """As vLLM 0.32's."""

    def __init__(self):
        self._registry = {}

    def register_connector(self, name, module_path, class_name):
        if name in self._registry:
            raise ValueError(f"Connector {name!r} is already registered.")
        self._registry[name] = (module_path, class_name)


def with_factory(monkeypatch, factory) -> None:
    module = ModuleType(vllm_plugin.FACTORY)
    if factory is not None:
        module.KVConnectorFactory = factory
    names = vllm_plugin.FACTORY.split(".")
    for i in range(1, len(names)):
        monkeypatch.setitem(sys.modules, ".".join(names[:i]), ModuleType(names[i - 1]))
    monkeypatch.setitem(sys.modules, vllm_plugin.FACTORY, module)


def test_registers_each_name_once(monkeypatch, caplog):
    factory = Factory()
    with_factory(monkeypatch, factory)
    vllm_plugin.register()
    vllm_plugin.register()
    assert factory._registry == vllm_plugin.CONNECTORS and not caplog.records


def test_names_exist():
    for module, name in vllm_plugin.CONNECTORS.values():
        assert name in importlib.import_module(module).__all__


class Other:
    def add(self): ...


class Broken:
    _registry = None


@pytest.mark.parametrize("factory", [None, Other(), Broken()], ids=["none", "other", "broken"])
def test_another_api_is_a_warning(monkeypatch, caplog, factory):
    with_factory(monkeypatch, factory)
    vllm_plugin.register()
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "kv_connector_module_path mooncake_serving.connectors.vllm" in record.getMessage()


def test_entry_point_is_declared():
    tomllib = pytest.importorskip("tomllib", reason="it is of Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [point] = project["entry-points"]["vllm.general_plugins"].values()
    module, _, name = point.partition(":")
    assert getattr(importlib.import_module(module), name) is vllm_plugin.register


IN_VLLM = """
from vllm.plugins import load_general_plugins
load_general_plugins()
from types import SimpleNamespace
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
config = SimpleNamespace(kv_connector="MooncakeKernelsConnector", kv_connector_module_path=None)
print(KVConnectorFactory.get_connector_class(config))
"""


def test_vllm_finds_the_connector_by_its_name(tmp_path):
    python = os.environ.get("MK_TEST_VLLM")
    if not python:
        pytest.skip("MK_TEST_VLLM names no Python that has vLLM: see `make test-vllm`")
    info = tmp_path / "mooncake_kernels-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mooncake-kernels\nVersion: 0\n")
    point = "mooncake_kernels = mooncake_serving.connectors.vllm_plugin:register"
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{point}\n")
    paths = os.pathsep.join(map(str, (tmp_path, ROOT / "python", ROOT)))
    done = subprocess.run(
        [python, "-c", IN_VLLM],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "mooncake_serving.connectors.vllm.connector.StoreConnector" in done.stdout, done.stderr
