"""Errors as JSON that names the argument."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from mooncake_kernels.errors import InvalidArgument, Unavailable


class NotHere(Exception):
    """The request needs something that this store does not have; the message says what."""


def add_error_handlers(app: FastAPI) -> None:
    """Make the app answer errors as ``models.ErrorAnswer``."""

    @app.exception_handler(RequestValidationError)
    def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place, *names = [part for part in first["loc"] if isinstance(part, str)]
        argument = ".".join(names) or place
        return problem(400, f"{argument}: {first['msg']}, got {first['input']!r:.80}", argument)

    @app.exception_handler(InvalidArgument)
    def invalid(_: Request, error: InvalidArgument) -> JSONResponse:
        return problem(400, str(error), argument_of(error))

    @app.exception_handler(Unavailable)
    @app.exception_handler(TimeoutError)
    def unavailable(_: Request, error: Exception) -> JSONResponse:
        return problem(503, str(error))

    @app.exception_handler(NotHere)
    def not_here(_: Request, error: NotHere) -> JSONResponse:
        return problem(501, str(error))

    @app.exception_handler(HTTPException)
    def refused(_: Request, error: HTTPException) -> JSONResponse:
        return problem(error.status_code, error.detail, headers=error.headers)

    @app.exception_handler(Exception)
    def failed(_: Request, error: Exception) -> JSONResponse:
        return problem(500, f"{type(error).__name__}: {error}")


def argument_of(error: InvalidArgument) -> str | None:
    """Extract the argument from a message ``op: argument must be ..., got ...``."""
    head, found, _ = str(error).partition(" must ")
    return head.rpartition(": ")[2] if found else None


def problem(
    status: int,
    message: str,
    argument: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Answer with a status and the reason."""
    body: dict[str, Any] = {"error": {"message": message, "argument": argument}}
    return JSONResponse(body, status, headers)
