"""The machine that the tests break."""

import pytest

from .machine import Disk, healthy


@pytest.fixture(scope="session")
def disk(tmp_path_factory):
    return Disk(tmp_path_factory.mktemp("machine"))


@pytest.fixture
def machine(disk):
    return healthy(disk)
