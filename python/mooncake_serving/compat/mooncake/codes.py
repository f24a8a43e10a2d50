"""The integers that Mooncake's calls return, and the mapping of failures to them."""

import functools
import logging
import operator
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from mooncake_kernels.errors import CudaError, InvalidArgument, TransferError, Unavailable

ERR_INVALID_ARGUMENT = -1  # returned by every failed initialize and transfer, as in Mooncake
ERR_ADDRESS_NOT_REGISTERED = -3
ERR_ADDRESS_OVERLAPPED = -7
ERR_DNS = -101
ERR_SOCKET = -102
ERR_NOT_IMPLEMENTED = -303

log = logging.getLogger(__package__)

Arguments = ParamSpec("Arguments")
Self = TypeVar("Self")
Method = Callable[Concatenate[Self, Arguments], int]


class Failed(Exception):
    """A failure with its own code."""

    def __init__(self, code: int, reason: str):
        self.code = code
        super().__init__(reason)


def returns(failure: int) -> Callable[[Method[Self, Arguments]], Method[Self, Arguments]]:
    """Wrap a raising method into one that logs the reason and returns ``failure``.

    A ``Failed`` returns its own code. Unforeseen exceptions are still raised.
    """

    def decorate(method: Method[Self, Arguments]) -> Method[Self, Arguments]:
        @functools.wraps(method)
        def call(self: Self, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> int:
            code = failure
            try:
                return method(self, *args, **kwargs)
            except Failed as failed:
                code, reason = failed.code, str(failed)
            except (InvalidArgument, Unavailable, TransferError, CudaError, OSError) as error:
                reason = str(error)
            log.error("%s: %.1000s", method.__name__, reason)  # it may quote a huge name
            return code

        return call

    return decorate


def as_flag(argument: str, value: Any) -> bool:
    """True or False, including numpy's."""
    if not isinstance(value, bool | np.bool_):
        raise InvalidArgument(f"{argument} must be True or False, got {value!r:.80}")
    return bool(value)


def as_natural(argument: str, value: Any, *, minimum: int = 0) -> int:
    """An integer that fits into 64 bits, including numpy's."""
    if type(value) is int and minimum <= value < 2**64:
        return value
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not minimum <= number < 2**64:
        raise InvalidArgument(
            f"{argument} must be an integer from {minimum} to 2**64 - 1, got {value!r:.80}"
        )
    return number
