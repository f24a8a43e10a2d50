"""Errors of the processes."""


class WorkerFailed(RuntimeError):
    """A worker process died or could not start, both were silent for too long, or were closed."""


class RequestFailed(RuntimeError):
    """Some requests could not be served.

    Attributes:
        reasons: by the job's index, which worker failed it, and why.
    """

    def __init__(self, reasons: dict[int, str]):
        super().__init__(reasons)
        self.reasons = dict(sorted(reasons.items()))

    def __str__(self) -> str:
        return "; ".join(f"request {index}, {why}" for index, why in self.reasons.items())
