"""Processes of commands, and vLLM's events as vLLM declares them."""

import contextlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from mooncake_serving.store.cli import main

from ..support import kill


class VllmBatch(msgspec.Struct, array_like=True):
    """vllm/distributed/kv_events.py, EventBatch."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class VllmBlockStored(msgspec.Struct, tag="BlockStored"):
    """The same, BlockStored: the fields its decoder requires, and one that may be left out."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None = None


class VllmBlockRemoved(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class VllmAllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class VllmMapBatch(VllmBatch, array_like=True):
    events: list[VllmBlockStored | VllmBlockRemoved | VllmAllBlocksCleared]


class OldBlockStored(msgspec.Struct, array_like=True, tag="BlockStored"):
    """As in older versions of vLLM, and in SGLang."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None


class OldBlockRemoved(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int]


class OldAllBlocksCleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class OldBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[OldBlockStored | OldBlockRemoved | OldAllBlocksCleared]


def forked(pipe: int, *arguments: Any) -> int:
    """Run a command in a forked process that writes to a pipe; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.dup2(pipe, 1)
        sys.stdout = os.fdopen(1, "w")
        status = main([str(one) for one in arguments])
    finally:
        os._exit(status)


@contextlib.contextmanager
def serving(*arguments: Any, access: Sequence[str] = ("--no-token",)):
    """``serve`` in a separate process; yields its id, and the lines it has printed."""
    reader, writer = os.pipe()
    pid = forked(writer, "serve", *arguments, *access)
    os.close(writer)
    try:
        with open(reader) as said:
            yield pid, said_by(said)
    finally:
        kill(pid)


def said_by(said: Iterable[str]) -> list[str]:
    """The lines of ``serve`` until it serves."""
    lines = []
    for line in said:
        lines.append(line.rstrip("\n"))
        if line.startswith("serving "):
            return lines
    raise AssertionError(f"serve has ended: {lines}")


def url_of(lines: list[str]) -> str:
    return lines[-1].rpartition(" ")[2]
