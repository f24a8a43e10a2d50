"""Errors of lending and borrowing."""


class LenderFailed(RuntimeError):
    """An instance that holds borrowed blocks is gone, did not answer in time, or refused.

    Whatever it held is lost to this instance.

    Attributes:
        instance: its name.
        cause: what went wrong.
    """

    def __init__(self, instance: str, cause: str):
        super().__init__(instance, cause)
        self.instance, self.cause = instance, cause

    def __str__(self) -> str:
        """Name the instance."""
        return f"instance {self.instance}: {self.cause}"


class Refusal(Exception):
    """A request of another instance is refused; it has changed nothing."""
