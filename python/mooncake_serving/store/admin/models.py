"""What the routes accept and answer: the source of the OpenAPI description."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

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
