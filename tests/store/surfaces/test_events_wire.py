"""Batches as vLLM's own structs read and write them, and malformed bytes."""

import contextlib
import time

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.store.events import AllBlocksCleared, BlockRemoved, BlockStored
from mooncake_serving.store.events.messages import decode, encode

from .support import (
    OldAllBlocksCleared,
    OldBatch,
    OldBlockRemoved,
    OldBlockStored,
    VllmAllBlocksCleared,
    VllmBatch,
    VllmBlockRemoved,
    VllmBlockStored,
    VllmMapBatch,
)

EVENTS = [
    BlockStored([1, 2**64 - 1], None, [], 16, None, "CPU"),
    BlockRemoved([2**64 - 1], "CPU"),
    AllBlocksCleared(),
]


def test_vllm_decodes_map_events():
    before = time.time()
    batch = msgspec.msgpack.decode(encode(EVENTS, 3, "map"), type=VllmMapBatch)
    assert before <= batch.ts <= time.time() and batch.data_parallel_rank == 3
    assert batch.events == [
        VllmBlockStored([1, 2**64 - 1], None, [], 16, None, "CPU", None),
        VllmBlockRemoved([2**64 - 1], "CPU"),
        VllmAllBlocksCleared(),
    ]
    plain = msgspec.msgpack.decode(encode(EVENTS, None, "map"))
    assert [event["type"] for event in plain[1]] == [
        "BlockStored", "BlockRemoved", "AllBlocksCleared"
    ]  # fmt: skip


def test_older_readers_decode_array_events():
    batch = msgspec.msgpack.decode(encode(EVENTS, None, "array"), type=OldBatch)
    assert batch.events == [
        OldBlockStored([1, 2**64 - 1], None, [], 16, None),
        OldBlockRemoved([2**64 - 1]),
        OldAllBlocksCleared(),
    ]


def test_events_of_vllm_are_decoded():
    theirs = [
        VllmBlockStored([b"\0" * 32], b"\1" * 32, [5, 6], 2, 7, "GPU", "lora", group_idx=0),
        VllmBlockRemoved([1], None),
        VllmAllBlocksCleared(),
    ]
    ours = [
        BlockStored([b"\0" * 32], b"\1" * 32, [5, 6], 2, 7, "GPU", "lora"),
        BlockRemoved([1], None),
        AllBlocksCleared(),
    ]
    assert decode(msgspec.msgpack.encode(VllmBatch(1.5, theirs, 2))) == (1.5, ours, 2, [])
    old = [OldBlockStored([1], 0, [5], 1, None), OldBlockRemoved([1]), OldAllBlocksCleared()]
    events = [BlockStored([1], 0, [5], 1, None), BlockRemoved([1]), AllBlocksCleared()]
    assert decode(msgspec.msgpack.encode(OldBatch(2.0, old))) == (2.0, events, None, [])


def test_a_batch_may_be_a_map():
    event = {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU"}
    batch = {"ts": 1.5, "events": [event], "data_parallel_rank": 3}
    assert decode(msgspec.msgpack.encode(batch)) == (1.5, [BlockRemoved([7], "CPU")], 3, [])
    del batch["data_parallel_rank"]
    assert decode(msgspec.msgpack.encode(batch))[2] is None
    with pytest.raises(InvalidArgument, match="must be a batch of KV events"):
        decode(msgspec.msgpack.encode({"events": [event]}))


def test_extra_fields_are_ignored():
    longer = ["BlockRemoved", [1], "CPU", 0, "LOCAL"]
    assert decode(msgspec.msgpack.encode([1.0, [longer], 0, "later"])) == (
        1.0,
        [BlockRemoved([1], "CPU")],
        0,
        [],
    )


def test_unknown_events_are_skipped():
    known = {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU"}
    later = {"type": "BlockMoved", "block_hashes": [1], "to": {"medium": "STORAGE"}}
    batch = [1.0, [later, known, ["TierAdded"], ["BlockRemoved", [1], "CPU"]], 0]
    events = [BlockRemoved([7], "CPU"), BlockRemoved([1], "CPU")]
    unknown = ["BlockMoved", "TierAdded"]
    assert decode(msgspec.msgpack.encode(batch)) == (1.0, events, 0, unknown)


def test_array_with_a_foreign_field_after_the_medium_is_decoded():
    """SGLang's arrays have no name of a LoRA."""
    fields = [[1], None, [5, 6], 2, None, "GPU"]
    batch = [1.0, [["BlockStored", *fields, {"cache_salt": "tenant"}]], None]
    assert decode(msgspec.msgpack.encode(batch))[1] == [BlockStored(*fields)]


HASHES = st.lists(st.integers(0, 2**64 - 1) | st.binary(max_size=32), max_size=5)
ANY_EVENT = (
    st.builds(BlockStored, HASHES, st.none(), st.just([]), st.integers(0, 512), st.none())
    | st.builds(BlockRemoved, HASHES, st.sampled_from([None, "CPU"]))
    | st.just(AllBlocksCleared())
)


@given(st.lists(ANY_EVENT, max_size=5), st.none() | st.integers(0, 9), st.booleans())
@settings(deadline=None)
def test_map_and_array_forms_round_trip(events, rank, as_maps):
    assert decode(encode(events, rank, "map" if as_maps else "array"))[1:] == (events, rank, [])


@pytest.mark.parametrize(
    "batch",
    [
        7,
        [],
        [1.0],
        ["now", []],
        [1.0, 5],
        [1.0, [5]],
        [1.0, [[]]],
        [1.0, ["BlockRemoved"]],
        [1.0, [["BlockMoved"], [[1]]]],
        [1.0, [[["BlockStored"], [1]]]],
        [1.0, [["BlockStored", [1]]]],
        [1.0, [{"type": "BlockStored", "block_hashes": [1]}]],
        [1.0, [{"type": "BlockRemoved", "block_hashes": [1.5]}]],
        [1.0, [{"block_hashes": [1]}]],
        [1.0, [{"type": ["BlockRemoved"]}]],
        [1.0, [], "zero"],
    ],
)
def test_invalid_batches_are_rejected(batch):
    with pytest.raises(InvalidArgument, match="^decode: payload must be a batch of KV events"):
        decode(msgspec.msgpack.encode(batch))


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_batch_or_an_error(payload):
    with contextlib.suppress(InvalidArgument):
        decode(payload)


def test_deeply_nested_bytes_are_an_error():
    with pytest.raises(InvalidArgument):
        decode(b"\x91" * 100_000 + b"\x00")


def test_cut_and_flipped_batches_are_batches_or_errors():
    payload = encode(EVENTS, 1, "map")
    generator = np.random.default_rng(0)
    num_batches = 0
    for _ in range(500):
        changed = bytearray(payload[: generator.integers(1, len(payload) + 1)])
        changed[generator.integers(len(changed))] ^= 1 << int(generator.integers(8))
        with contextlib.suppress(InvalidArgument):
            decode(bytes(changed))
            num_batches += 1
    assert 0 < num_batches < 500
