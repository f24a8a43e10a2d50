"""Packages of the extra are imported by surfaces alone, and only once these are used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mooncake_serving.store

ROOT = Path(mooncake_serving.store.__file__).parent
EXTRA = {"fastapi", "prometheus_client", "pydantic", "rich", "starlette", "uvicorn", "zmq"}
SURFACES = {"admin", "events", "metrics"}  # whoever imports these wants them
MODULES = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if not any(str(path.relative_to(ROOT)).startswith(name) for name in SURFACES)
]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_optional_modules_are_not_imported_elsewhere(path):
    for node in ast.parse(path.read_text()).body:  # what is in functions is imported when called
        if isinstance(node, ast.Import):
            assert not EXTRA & {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            assert node.level or module.partition(".")[0] not in EXTRA
            names = {module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)}
            if node.level:
                assert not names & {"admin", "events", "metrics", "view"}


@pytest.mark.parametrize(
    "module, packages, extra",
    [  # packages in the order of their imports: what was imported before one failed stays so
        ("mooncake_serving.store.admin", "fastapi uvicorn prometheus_client msgspec", "store"),
        ("mooncake_kernels.http_server", "uvicorn", "metadata"),
        ("mooncake_serving.store.events", "msgspec zmq", "store"),
        ("mooncake_serving.store.metrics", "prometheus_client", "store"),
        ("mooncake_kernels.triton", "triton", "gpu"),
    ],
)
def test_a_missing_package_is_reported_with_its_extra(module, packages, extra):
    code = f"""
import importlib, sys
import mooncake_serving.store

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
loaded = set(sys.modules)
for package in {packages!r}.split():
    for name in set(sys.modules) - loaded:
        if name.partition(".")[0] in ("mooncake_serving", package):
            del sys.modules[name]  # which was imported before another package was missing
    try:
        importlib.import_module({module!r})
    except ModuleNotFoundError as error:
        print(error.name, error)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    expected = [
        f"{name} {module}: {name} is not installed: pip install 'mooncake-kernels[{extra}]'"
        for name in packages.split()
    ]
    assert ran.stdout.splitlines() == expected, ran.stderr
