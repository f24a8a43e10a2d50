"""Shared by the tests in the guest: pyverbs as the peer, and the C objects behind it."""

import ctypes
import importlib
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

from ...conftest import skip


def pyverbs_or_skip(*modules: str) -> list[ModuleType]:
    """Import pyverbs' modules, for example ``pyverbs_or_skip("device", "pd")``."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    package = importlib.util.find_spec("pyverbs")
    if package and not list(Path(package.submodule_search_locations[0]).glob(f"*{suffix}")):
        pytest.skip(f"pyverbs is for another Python than {suffix}")
    try:
        return [importlib.import_module(f"pyverbs.{name}") for name in modules]
    except ImportError as error:
        skip("rdma", f"pyverbs cannot be imported: {error}")
        raise


def c_object(wrapper: object) -> int:
    """Return the address of the ibv_context or ibv_pd that a pyverbs Context or PD owns.

    There is no other way: PD.pd of pyverbs 44 takes the pointer for a Python object, and crashes. A
    Cython class keeps its own fields after those of its base, and the pointer is the first field
    of these two.
    """
    (base,) = type(wrapper).__bases__
    address = ctypes.c_uint64.from_address(id(wrapper) + base.__basicsize__).value
    assert address, f"{type(wrapper).__name__} is closed"
    return address
