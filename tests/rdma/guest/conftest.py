"""The order of the guest's tests."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that take a NIC away come last."""
    items.sort(key=lambda item: item.path.name == "test_removal.py")
