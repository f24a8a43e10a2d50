"""What can go wrong with a model or its cache, named by who can act on it.

A bad argument is a plain ``ValueError`` whose message names the argument and its value.
"""


class ModelNotFound(FileNotFoundError):
    """No model lies where it was looked for; the message says where and how to get one."""


class InvalidModel(ValueError):
    """A model's files are there but damaged: truncated, a tensor missing or of another shape."""


class UnsupportedModel(ValueError):
    """A model's files are whole, but this engine would compute something else than they mean."""


class OutOfBlocks(RuntimeError):
    """The cache has fewer free blocks than were asked for; nothing was allocated."""
