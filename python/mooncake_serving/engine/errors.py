"""Errors of a model or its cache, grouped by who can act on them.

A bad argument is a ``mooncake_kernels.InvalidArgument``, which is a ``ValueError``.
"""

import contextlib
from collections.abc import Iterator


class ModelNotFound(FileNotFoundError):
    """There is no model at the expected place; the message says where and how to get one."""


class InvalidModel(ValueError):
    """A model's files are damaged: truncated, or a tensor is missing or has another shape."""


@contextlib.contextmanager
def damaged_if_it_fails(what: str) -> Iterator[None]:
    """Name the damaged file in what the tokenizers library raises, even where it panics.

    Raises:
        InvalidModel: in place of its errors.
    """
    try:
        yield
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"  # of Rust: no Exception
        if not isinstance(error, Exception) and not is_panic:
            raise
        raise InvalidModel(f"load_model: {what} is damaged: {error}") from error


class UnsupportedModel(ValueError):
    """A model's files are intact, but this engine would compute something else than they mean."""


class NotFinite(RuntimeError):
    """A model computed NaN or infinity for some requests: no token of theirs can be chosen.

    Attributes:
        requests: their ids; of ``sample``, its rows.
    """

    def __init__(self, op: str, requests: list[int]):
        super().__init__(op, requests)
        self.requests = requests

    def __str__(self) -> str:
        """Name the requests."""
        return f"{self.args[0]}: logits must be finite, got others for requests {self.requests}"


class OutOfBlocks(RuntimeError):
    """The cache has fewer free blocks than were asked for; nothing was allocated."""


class WorkerFailed(RuntimeError):
    """A process has died, could not start, was silent for too long, or was closed."""
