"""Wait for what another thread or process does."""

import inspect
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
WAIT_S = 120.0  # longer than anything here takes: a test that needs it has failed


def eventually(condition: Callable[[], Result], what: str = "") -> Result:
    """Wait until its result is true, and return that.

    Raises:
        AssertionError: it never does; ``what``, or the source of the condition, says what.
    """
    until = time.monotonic() + WAIT_S
    while not (result := condition()):
        assert time.monotonic() < until, what or f"it never holds: {_source(condition)}"
        time.sleep(0.002)
    return result


def _source(condition: Callable[[], object]) -> str:
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):  # it has none: a program given to python -c, or C
        return repr(condition)
