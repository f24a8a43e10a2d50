"""What ends a command with status 1."""


class Failed(Exception):
    """It was understood and could not be done; the message says why."""
