"""Installs this package as ``mooncake``, for programs whose sources stay unchanged."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from . import engine, mooncake_config, store

NAME = "mooncake"


def install() -> None:
    """Let ``import mooncake.engine``, ``mooncake.store`` and ``mooncake.mooncake_config`` give the
    modules of this package.

    It applies to this process, from now on. Idempotent. ``python -m mooncake_kernels drop-in``
    applies to all processes of an environment.

    Raises:
        ImportError: Mooncake itself has been imported: its names are in use already.
    """
    known = sys.modules.get(NAME)
    ours = {"engine": engine, "mooncake_config": mooncake_config, "store": store}
    if known and any(getattr(known, name, None) is not ours[name] for name in ours):
        raise ImportError(f"install: {NAME} must not be imported before, got {known!r}")
    module = ModuleType(NAME, __doc__)
    module.__spec__ = ModuleSpec(NAME, None, is_package=True)  # programs look whether there is one
    module.__path__ = []
    vars(module).update(ours)
    sys.modules.update({NAME: module, **{f"{NAME}.{name}": one for name, one in ours.items()}})
