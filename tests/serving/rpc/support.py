"""A protocol with one request and one answer."""

from typing import Annotated

from msgspec import Meta

from mooncake_serving import rpc


class Add(rpc.Message, frozen=True, tag=1):
    numbers: Annotated[tuple[rpc.Number, ...], Meta(max_length=3)]


class Sum(rpc.Message, frozen=True, tag=16):
    total: int


CODEC: rpc.Codec = rpc.Codec(b"ADD\x01", Add | Sum | rpc.Refused, "this file")
WAIT_S = 30.0
