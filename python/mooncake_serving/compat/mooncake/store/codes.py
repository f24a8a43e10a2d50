"""The integers that Mooncake's store returns, and the mapping of failures to them."""

import copy
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from mooncake_kernels.errors import (
    ChecksumError,
    CudaError,
    FailureKind,
    InvalidArgument,
    TransferError,
    Unavailable,
)

from ..codes import Failed
from .naming import as_text

INTERNAL_ERROR = -1
NO_AVAILABLE_HANDLE = -200  # there is no room
INVALID_PARAMS = -600
OBJECT_NOT_FOUND = -704
OBJECT_ALREADY_EXISTS = -705  # to a session only: putting an existing value returns 0
TRANSFER_FAIL = -800
CHECKSUM_MISMATCH = -801
RPC_FAIL = -900  # the directory does not answer
FILE_NOT_FOUND = -1100  # from a save: there is no such tensor
TASK_NOT_FOUND = -1400

log = logging.getLogger(__package__)

Arguments = ParamSpec("Arguments")
Self = TypeVar("Self")
Answer = TypeVar("Answer")
Otherwise = TypeVar("Otherwise")
Method = Callable[Concatenate[Self, Arguments], Answer]

KEYS = {"key", "keys", "base_keys", "all_keys"}  # parameters

_CODES: dict[type[Exception], int] = {
    InvalidArgument: INVALID_PARAMS,
    ChecksumError: CHECKSUM_MISMATCH,
    TransferError: TRANSFER_FAIL,
    CudaError: TRANSFER_FAIL,
    Unavailable: RPC_FAIL,
    MemoryError: NO_AVAILABLE_HANDLE,
    OSError: INTERNAL_ERROR,  # and TimeoutError: a stopped process holds the pool
}
FAILURES: tuple[type[Exception], ...] = (*_CODES, Failed)


@functools.cache
def warn_once(what: str) -> None:
    """Log a warning, if it is the first of its kind in this process."""
    log.warning("%s", what)


def takes_bytes(
    method: Method[Self, Arguments, Answer],
    failed: Callable[[str, Exception], Otherwise] | None = None,
) -> Method[Self, Arguments, Answer | Otherwise]:
    """Wrap a method into one that takes keys as bytes, too.

    Args:
        method: of a store.
        failed: what is returned if it fails, of its name and the reason; None: that is raised.
    """
    op = method.__name__
    parameters = [*inspect.signature(method).parameters][1:]
    name, at = "", sys.maxsize  # of the keys, if it has any
    if found := KEYS.intersection(parameters):
        [name] = found
        at = parameters.index(name)

    @functools.wraps(method)
    def call(self: Self, /, *args: Any, **kwargs: Any) -> Answer | Otherwise:
        try:
            if len(args) > at and type(args[at]) is not str:
                args = (*args[:at], as_text(args[at]), *args[at + 1 :])
            elif name in kwargs:
                kwargs[name] = as_text(kwargs[name])
            return method(self, *args, **kwargs)
        except FAILURES as error:
            if failed is None:
                raise
            return failed(op, error)

    return call


def returns_code(method: Method[Self, Arguments, int]) -> Method[Self, Arguments, int]:
    """Wrap a method that raises into one that logs the reason and returns its code."""
    return takes_bytes(method, _logged_code)


def returns_instead(
    otherwise: Otherwise,
) -> Callable[[Method[Self, Arguments, Answer]], Method[Self, Arguments, Answer | Otherwise]]:
    """Wrap a raising method into one that logs the reason and returns ``otherwise``."""

    def decorate(
        method: Method[Self, Arguments, Answer],
    ) -> Method[Self, Arguments, Answer | Otherwise]:
        return takes_bytes(method, instead)

    def instead(op: str, error: Exception) -> Otherwise:
        _log(op, error)
        return copy.deepcopy(otherwise)  # a list that is returned belongs to the caller

    return decorate


def or_else(
    op: str, call: Callable[[], Answer], otherwise: Callable[[], Otherwise]
) -> Answer | Otherwise:
    """Return the result of a call; if it fails, log the reason and return that of another."""
    try:
        return call()
    except FAILURES as error:
        _log(op, error)
        return otherwise()


def code_of(op: str, call: Callable[[], int]) -> int:
    """Return the result of a call; if it fails, log the reason and return its code."""
    try:
        return call()
    except FAILURES as error:
        return _logged_code(op, error)


def fill(
    op: str,
    answers: list[Answer | int],
    places: Sequence[int],
    call: Callable[[], Sequence[Answer | int]],
) -> None:
    """Store the results of a call at these places of a list; on a failure, its code at all."""

    def run() -> int:
        for i, answer in zip(places, call(), strict=True):
            answers[i] = answer
        return 0

    if places and (failure := code_of(op, run)):
        for i in places:
            answers[i] = failure


def check_list(argument: str, value: Any, depth: int = 1) -> None:
    """Refuse a value that is not a list, or list of lists, of this depth; strings are refused."""
    is_text = isinstance(value, str | bytes)
    if is_text or not isinstance(value, Sequence | np.ndarray) or _is_no_sequence(value):
        raise InvalidArgument(f"{argument} must be a list, got {value!r:.80}")
    if depth > 1:
        for one in value:
            check_list(f"each of {argument}", one, depth - 1)


def _logged_code(op: str, error: Exception) -> int:
    """Log a failure, and return its code."""
    _log(op, error)
    if isinstance(error, Failed):
        return error.code
    if isinstance(error, TransferError) and error.kind is FailureKind.CHECKSUM:
        return CHECKSUM_MISMATCH
    return next(code for kind, code in _CODES.items() if isinstance(error, kind))


def _log(op: str, error: Exception) -> None:
    log.error("%s: %s", op, str(error))  # not the error, whose frames keep objects alive


def _is_no_sequence(value: Any) -> bool:
    """Whether it only looks like a sequence: an array of no axes, a range beyond all bounds."""
    try:
        return len(value) < 0
    except (TypeError, OverflowError):
        return True
