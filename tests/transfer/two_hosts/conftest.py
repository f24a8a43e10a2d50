import pytest

from .hosts import transfers, two_hosts


@pytest.fixture
def hosts():
    with two_hosts() as joined:
        yield joined


@pytest.fixture
def both(hosts):
    """Transfers between the two hosts."""
    with transfers(hosts) as started:
        yield started
