"""Which engines a hook was written for: it replaces private functions, so others are refused."""

import inspect
from collections.abc import Callable, Sequence
from importlib import metadata

from mooncake_kernels.errors import Unavailable


def check_version(hook: str, distributions: Sequence[str], known: Sequence[str]) -> None:
    """Refuse an engine whose version the hook was not written for.

    Args:
        hook: for the message.
        distributions: names under which the engine may be installed.
        known: versions, or their beginnings: "0.32" is 0.32.0, too.

    Raises:
        Unavailable: none is installed, or another version.
    """
    for name in distributions:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        release = version.partition("+")[0]  # without what a build adds, such as +cpu
        if any(release == one or release.startswith(f"{one}.") for one in known):
            return
        raise Unavailable(f"{hook}: {name} must be {' or '.join(known)}, got {version}")
    raise Unavailable(f"{hook}: {' or '.join(distributions)} must be installed")


def check_parameters(hook: str, function: Callable, known: Sequence[Sequence[str]]) -> None:
    """Refuse a function whose parameters are not those that the hook was written for.

    Raises:
        Unavailable: they are others.
    """
    names = list(inspect.signature(function).parameters)
    if names not in [list(parameters) for parameters in known]:
        expected = " or ".join(f"({', '.join(parameters)})" for parameters in known)
        raise Unavailable(
            f"{hook}: {function.__name__} must take {expected}, got ({', '.join(names)})"
        )
