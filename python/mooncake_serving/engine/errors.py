"""Errors of a model or its cache, grouped by who can act on them.

A bad argument is a ``mooncake_kernels.InvalidArgument``, which is a ``ValueError``.
"""


class ModelNotFound(FileNotFoundError):
    """There is no model at the expected place; the message says where and how to get one."""


class InvalidModel(ValueError):
    """A model's files are damaged: truncated, or a tensor is missing or has another shape."""


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
