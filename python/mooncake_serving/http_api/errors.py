"""What clients are answered when a request cannot be served: error bodies as OpenAI's are."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec


@dataclass(eq=False)
class ErrorAnswer(Exception):
    """A request that ends with an error.

    Attributes:
        status: of HTTP.
        message: for people.
        code: for programs.
        param: which entry of the body is wrong, if one is.
        headers: of the answer, besides those of its body.
    """

    status: int
    message: str
    code: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> bytes:
        """Return the answer's JSON."""
        return msgspec.json.encode({"error": self._fields()})

    def event(self) -> bytes:
        """Return the same as an event of a stream that has begun."""
        return b"data: " + self.body() + b"\n\n"

    def _fields(self) -> dict[str, str | None]:
        if self.status == 429:
            kind = "rate_limit_error"
        else:
            kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}


def overloaded(message: str) -> ErrorAnswer:
    """Make the error of a request that may be tried again in a second."""
    return ErrorAnswer(429, message, "overloaded", headers={"retry-after": "1"})


def invalid(param: str, wanted: str) -> ErrorAnswer:
    """Make the error of a body with a wrong entry."""
    return ErrorAnswer(400, f"{param} must be {wanted}", "invalid_value", param)
