"""Errors of an engine that borrows, and of a cluster of them."""


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


class RequestFailed(RuntimeError):
    """Some requests could not be served.

    Attributes:
        reasons: by the job's index, which instance failed it, and why.
    """

    def __init__(self, reasons: dict[int, str]):
        super().__init__(reasons)
        self.reasons = dict(sorted(reasons.items()))

    def __str__(self) -> str:
        """Name the requests, and why each has failed."""
        return "; ".join(f"request {index}, {why}" for index, why in self.reasons.items())
