"""Errors of an engine that borrows."""


class LoansLost(RuntimeError):
    """An instance that held keys and values of requests has failed: those requests have ended.

    Attributes:
        instance: its name.
        cause: what went wrong.
        requests: the ids of the requests.
    """

    def __init__(self, instance: str, cause: str, requests: list[int]):
        super().__init__(instance, cause, requests)
        self.instance, self.cause, self.requests = instance, cause, requests

    def __str__(self) -> str:
        """Name the instance and the requests."""
        return (
            f"step: requests {self.requests} have ended, whose keys and values were at instance "
            f"{self.instance}: {self.cause}"
        )
