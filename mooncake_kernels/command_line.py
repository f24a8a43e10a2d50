"""How a command ends: its exit status, and one line for what went wrong."""

import os
import select
import sys
from collections.abc import Callable

from .extras import MissingExtra


def run_command(
    run: Callable[[], int | None],
    *,
    extra: str = "",
    errors: tuple[type[Exception], ...] = (),
) -> int:
    """Run a command, and print an error that its user can act on as one line.

    Args:
        run: the command; it returns the exit status, or None for 0.
        extra: the extra of mooncake-kernels that brings the packages it needs.
        errors: what is printed so besides ValueError and OSError; others keep their traceback.

    Returns:
        the exit status: 130 after Ctrl-C; 1 if the reader of the output is gone or a package is
        missing; 2 after an error that was printed.
    """
    if sys.stdout is None:  # closed, as by some who start services: what is written is lost
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    expected: tuple[type[Exception], ...] = (ValueError, OSError, *errors)
    try:
        status = run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130  # as a shell reports SIGINT
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("mooncake"):
            raise
        package = missing.name.partition(".")[0]
        extra = extra or (missing.extra if isinstance(missing, MissingExtra) else "")
        wanted = f"'mooncake-kernels[{extra}]'" if extra else package
        sys.stderr.write(f"error: {package} is not installed: pip install {wanted}\n")
        return 1
    except expected as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            # The interpreter's final flush shall be silent.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        sys.stderr.write(f"error: {error}\n")
        return 2
    return status or 0


def _reader_is_gone() -> bool:
    """Whether nobody reads the output: another pipe or socket may be the one that broke."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return bool(output.poll(0))
