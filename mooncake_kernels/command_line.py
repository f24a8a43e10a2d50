"""How a command ends: its exit status, and one line for what went wrong."""

import os
import sys
from collections.abc import Callable


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
    expected: tuple[type[Exception], ...] = (ValueError, OSError, *errors)
    try:
        status = run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130  # as a shell reports SIGINT
    except BrokenPipeError:  # the reader is gone: keep the interpreter's final flush silent
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("mooncake"):
            raise
        package = missing.name.partition(".")[0]
        wanted = f"'mooncake-kernels[{extra}]'" if extra else package
        sys.stderr.write(f"error: {package} is not installed: pip install {wanted}\n")
        return 1
    except expected as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return status or 0
