"""KV events on the wire, in vLLM's format: MessagePack of its structs, in either of its two forms.

A batch is an array ``[ts, events, data_parallel_rank]``, or a map of these. An event is a map with
a field ``type`` (vLLM since 2026) or an array that begins with its type (vLLM before, SGLang).
Unknown fields are ignored, and unknown events left out, so that newer publishers are understood.
"""

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from mooncake_kernels.errors import InvalidArgument

Form = Literal["map", "array"]
BlockHash = int | bytes
MEDIUM, DISK = "CPU", "STORAGE"  # vLLM's words for host memory, and what is behind it


class Event(msgspec.Struct, frozen=True, tag=True):
    """One of the three below."""


class BlockStored(Event, frozen=True):
    """Blocks can be read now.

    Attributes:
        block_hashes: of the blocks.
        parent_block_hash: the block that the first of them continues; None: unknown, or none.
        token_ids: of the blocks; empty, since a store knows hashes and not tokens.
        block_size: in tokens; 0: unknown.
        lora_id: None; users that need it put it into the namespace.
        medium: where they are: "GPU", "CPU", "STORAGE".
        lora_name: as ``lora_id``.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None


class BlockRemoved(Event, frozen=True):
    """Blocks can no longer be read from this medium."""

    block_hashes: list[BlockHash]
    medium: str | None = None


class AllBlocksCleared(Event, frozen=True):
    """No block of any earlier event can be read any more."""


AnyEvent = BlockStored | BlockRemoved | AllBlocksCleared
TYPES = {kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}
BATCH_FIELDS = ("ts", "events", "data_parallel_rank")
_decoder = msgspec.msgpack.Decoder(list[Any] | dict[str, Any])


def encode(events: Sequence[AnyEvent], data_parallel_rank: int | None, form: Form) -> bytes:
    """Encode a batch with the current time."""
    items = events if form == "map" else [_as_array(event) for event in events]
    return msgspec.msgpack.encode([time.time(), items, data_parallel_rank])


def decode(payload: bytes) -> tuple[float, list[AnyEvent], int | None, list[str]]:
    """Decode a batch in either form: ``(ts, events, data_parallel_rank, unknown)``, of which the
    last are the types of events that are none of ours, and are left out.

    Raises:
        InvalidArgument: it is not a batch.
    """
    try:
        batch = _decoder.decode(payload)
        if isinstance(batch, dict):
            batch = [batch.get(field) for field in BATCH_FIELDS]
        ts, items, rank = (*batch, None)[:3]
        typed = [(_type_of(item), item) for item in msgspec.convert(items, list[list | dict])]
        return (
            msgspec.convert(ts, float),
            [_as_event(kind, item) for kind, item in typed if kind in TYPES],
            msgspec.convert(rank, int | None),
            [kind for kind, _ in typed if kind not in TYPES],
        )
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"decode: payload must be a batch of KV events: {error}") from None


def _as_array(event: AnyEvent) -> list[Any]:
    return [type(event).__name__, *msgspec.structs.astuple(event)]


def _type_of(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else item[0] if item else None
    if not isinstance(kind, str):
        raise ValueError(f"there is no event {item!r:.80}")
    return kind


def _as_event(kind: str, item: Any) -> AnyEvent:
    if isinstance(item, list):
        fields = TYPES[kind].__struct_fields__
        item = {"type": kind, **dict(zip(fields, item[1:], strict=False))}
        if not isinstance(item.get("lora_name"), str | None):
            del item["lora_name"]  # SGLang has a map of something else in its place
    return msgspec.convert(item, AnyEvent)
