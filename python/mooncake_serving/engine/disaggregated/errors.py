"""Errors of the processes."""


class WorkerFailed(RuntimeError):
    """A worker process died, could not start, or has been silent for too long."""


class RequestFailed(RuntimeError):
    """One request could not be served; the message has the worker's reason."""
