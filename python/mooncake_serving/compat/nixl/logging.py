"""``nixl.logging``: where this package logs."""

import logging

NAME = "mooncake_serving.compat.nixl"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module of this package, or of a program's own."""
    return logging.getLogger(name if name.startswith(NAME) else f"{NAME}.{name.lstrip('_')}")
