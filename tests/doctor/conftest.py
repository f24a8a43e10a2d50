"""The machine that the tests break."""

import pytest

from .machine import healthy


@pytest.fixture
def machine(tmp_path):
    return healthy(tmp_path)
