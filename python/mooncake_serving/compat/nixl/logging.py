"""``nixl.logging``: where this package logs."""

import logging

NAME = "mooncake_serving.compat.nixl"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module of this package, or of a program's own."""
    return logging.getLogger(name if name.startswith(NAME) else f"{NAME}.{name.lstrip('_')}")


def shown(text: object) -> str:
    """What others have sent, for a line of a log: printable and short."""
    escaped = [
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in str(text)[:400]
    ]
    return "".join(escaped)
