"""Directories of both kinds, as in tests/store/directory."""

from ..directory.conftest import make_world, patient, permanent, server

__all__ = ["make_world", "patient", "permanent", "server"]
