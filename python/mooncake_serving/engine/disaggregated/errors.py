"""Errors of the processes."""


class WorkerFailed(RuntimeError):
    """A worker process died or could not start, both were silent for too long, or were closed."""


class RequestFailed(RuntimeError):
    """One request could not be served; the message has the worker's reason."""
