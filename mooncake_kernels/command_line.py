"""How a command ends: its exit status, and one line for what went wrong."""

import os
import select
import sys
from collections.abc import Callable

from .extras import MissingExtra
from .metadata.url import has_secret
from .private_files import first_line


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
        if isinstance(missing, MissingExtra):
            extra = missing.extra
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


def server_url(option: str, given: str | None, file: str | None, setting: str) -> str | None:
    """Choose the URL of a server, which may have a password.

    Args:
        option: its name, as ``--directory``; that of the file has ``-file`` at its end.
        given: what it has; a password there is shown to every user of the machine, with a warning.
        file: of whose first line else.
        setting: from the environment, else; empty: none.

    Raises:
        ValueError: both options are given, or the file has no line of printable ASCII.
        OSError: the file cannot be read.
    """
    if given is not None and file is not None:
        raise ValueError(f"{option} must not be given with {option}-file")
    if file is not None:
        return first_line(file)
    if given is not None and has_secret(given):
        sys.stderr.write(
            f"warning: {option} has a login: every user of this machine can see it while this "
            f"runs; use {option}-file\n"
        )
    return given if given is not None else setting or None


def _reader_is_gone() -> bool:
    """Whether no one reads the output: another pipe or socket may be the one that broke."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return bool(output.poll(0))
