"""What the routes accept and answer, and how errors are: the source of the OpenAPI description."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from mooncake_kernels.errors import InvalidArgument, Unavailable

KeyText = Annotated[
    str, Field(description="0x and 32 hexadecimal digits: 16 of the hash, 16 of the scope")
]


class Problem(BaseModel):
    """Why a request was not done."""

    message: str
    argument: str | None = Field(None, description="which argument is wrong, if one is")


class ErrorAnswer(BaseModel):
    error: Problem


class Health(BaseModel):
    status: Literal["ok"]
    pool: str = Field(description="path of the pool")


class ObjectEntry(BaseModel):
    key: KeyText
    num_bytes: int
    retention: Literal["normal", "soft", "hard"]
    recency: int = Field(description="the pool's clock when it was last used: one more a use")


class ObjectPage(BaseModel):
    objects: list[ObjectEntry] = Field(description="in the order of their keys")
    next: KeyText | None = Field(description="`after` of the next page; null: this is the last")


class SsdEntry(BaseModel):
    """The disk behind a pool."""

    path: str
    capacity_bytes: int
    live_bytes: int = Field(description="of its objects, without headers and padding")
    num_objects: int
    num_queued: int = Field(description="objects that wait to be written")
    is_writable: bool
    error: str = Field(description="of the last write or sync; empty if it went well")


class PoolEntry(BaseModel):
    """A segment: memory of one host, whose objects all its processes share."""

    pool: str
    host: str | None = Field(description="null: this one")
    capacity_bytes: int
    free_bytes: int
    largest_free_bytes: int | None = Field(description="null of a pool of another host, and so on")
    num_free_spans: int | None
    fragmentation: float | None = Field(description="1 - largest free part / free bytes")
    num_objects: int | None
    num_pins: int | None
    num_processes: int | None
    ssd: SsdEntry | None = Field(None, description="null: none, or of another host")


class MemberEntry(BaseModel):
    name: str
    host: str
    pool: str = Field(description="which it serves; empty: none")
    capacity_bytes: int
    free_bytes: int
    is_draining: bool


class EvictRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    num_bytes: Annotated[int, Field(strict=True, ge=1, lt=2**63)]


class Evictions(BaseModel):
    num_objects: int
    num_bytes: int = Field(description="less than was asked for if nothing else can be evicted")


class DrainProgress(BaseModel):
    state: Literal["idle", "draining", "left", "failed"]
    num_moved: int = Field(description="objects that other pools have now, and this one has not")
    num_gone: int = Field(
        description="objects that went otherwise: removed, evicted, damaged, given up by the disk"
    )
    num_left: int = Field(description="objects that are still in memory, as of the last batch")
    num_on_disk: int = Field(description="others that are still on the disk behind it")
    num_failed: int = Field(description="objects that could not be moved")
    error: str | None = Field(description="what ended it")
    is_accepting: bool = Field(description="whether this node takes new objects")


class DrainRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    node: Annotated[str, Field(min_length=1, description="name of a member")]
    leave_disk: Annotated[
        bool,
        Field(strict=True, description="leave what only its disk has: it comes back with it"),
    ] = False


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

    @app.exception_handler(NotImplementedError)  # of a cluster, or for want of one
    def impossible(_: Request, error: NotImplementedError) -> JSONResponse:
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
