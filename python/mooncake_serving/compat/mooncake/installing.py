"""Installs this package as ``mooncake``, for programs whose sources stay unchanged."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from . import engine, store

NAME = "mooncake"


def install() -> None:
    """Let ``import mooncake.engine`` and ``import mooncake.store`` import this package's modules.

    It applies to this process, from now on. Idempotent.

    Raises:
        ImportError: Mooncake itself has been imported: its names are in use already.
    """
    known, ours = sys.modules.get(NAME), {"engine": engine, "store": store}
    if known and any(getattr(known, name, None) is not ours[name] for name in ours):
        raise ImportError(f"install: {NAME} must not be imported before, got {known!r}")
    module = ModuleType(NAME, __doc__)
    module.__spec__ = ModuleSpec(NAME, None, is_package=True)  # programs look whether there is one
    module.__path__ = []
    module.engine, module.store = engine, store  # type: ignore[attr-defined]
    sys.modules.update({NAME: module, f"{NAME}.engine": engine, f"{NAME}.store": store})
