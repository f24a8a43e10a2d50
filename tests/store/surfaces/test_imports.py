"""Packages of the extra are imported by surfaces alone, and only once these are used."""

import ast
from pathlib import Path

import pytest

import mooncake_serving.store

ROOT = Path(mooncake_serving.store.__file__).parent
EXTRA = {"fastapi", "prometheus_client", "pydantic", "rich", "starlette", "uvicorn", "zmq"}
SURFACES = {"admin", "events", "metrics", "cli/view"}  # whoever imports these wants them
MODULES = [
    path
    for path in sorted(ROOT.rglob("*.py"))
    if not any(str(path.relative_to(ROOT)).startswith(name) for name in SURFACES)
]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_else_imports_them(path):
    for node in ast.parse(path.read_text()).body:  # what is in functions is imported when called
        if isinstance(node, ast.Import):
            assert not EXTRA & {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            assert node.level or module.partition(".")[0] not in EXTRA
            names = {module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)}
            if node.level:
                assert not names & {"admin", "events", "metrics", "view"}
