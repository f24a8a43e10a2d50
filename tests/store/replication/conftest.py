"""Hosts that share an embedded directory, as in tests/store/cluster."""

from ..cluster.conftest import hosts

__all__ = ["hosts"]
