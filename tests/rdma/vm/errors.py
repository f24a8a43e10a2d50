"""The runner's error when there can be no guest."""


class NoGuest(Exception):
    """The guest cannot be started; the message says what is missing and how to get it."""
