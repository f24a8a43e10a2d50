"""docs/serving/nixl.md: its code runs, and all calls and exceptions are in its tables."""

import inspect
from pathlib import Path

import pytest

from mooncake_serving.compat.nixl import errors, nixl_agent
from tests.pages import run_block

PAGE = (Path(__file__).parents[3] / "docs/serving/nixl.md").read_text()
CALLS = [name for name, _ in inspect.getmembers(nixl_agent, inspect.isfunction) if name[0] != "_"]
ERRORS = [name for name in vars(errors) if name.startswith("nixl") and name != "nixlUnknownError"]


def test_the_code_of_the_page():
    run_block("serving/nixl", 0, {})


@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_listed(name):
    assert f"`{name}" in PAGE


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_listed(name):
    assert f"`{name}`" in PAGE
