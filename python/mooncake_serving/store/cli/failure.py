"""The error that ends a command with status 1."""


class Failed(Exception):
    """The command was understood but failed; the message says why."""
