"""Answers of routes."""

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ExceptionHandler

from .errors import ErrorAnswer


def json_answer(content: Any) -> Response:
    """Answer with JSON."""
    return Response(msgspec.json.encode(content), media_type="application/json")


async def _answered(_: Request, error: Exception) -> Response:
    assert isinstance(error, ErrorAnswer)
    return Response(error.body(), error.status, dict(error.headers), media_type="application/json")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "refused")
    message = f"{request.method} {request.url.path[:80]}: {error.detail}"
    headers = dict(error.headers or {})
    return await _answered(request, ErrorAnswer(error.status_code, message, code, headers=headers))


async def _unforeseen(request: Request, error: Exception) -> Response:
    message = f"the server has failed: {type(error).__name__}"
    return await _answered(request, ErrorAnswer(500, message, "internal_error"))


# For Starlette: every error has OpenAI's form.
HANDLERS: dict[Any, ExceptionHandler] = {
    ErrorAnswer: _answered,
    HTTPException: _refused,
    Exception: _unforeseen,
}
