"""Keys given as bytes: the same as text, in every call."""

import contextlib
import inspect

import numpy as np
import pytest
import torch

from mooncake_serving.compat.mooncake.store import INVALID_PARAMS, MooncakeDistributedStore
from mooncake_serving.compat.mooncake.store.codes import KEYS

from .store_support import Memory, pool_file, set_up

TENSOR = torch.arange(12.0).reshape(4, 3)
OTHERS = {
    "value": b"value",
    "values": [b"value", b"other"],
    "parts": b"value",
    "size": 400,
    "sizes": [400, 500],
    "all_sizes": [[10], [20]],
    "all_dst_offsets": [[0], [0]],
    "all_src_offsets": [[0], [0]],
    "metadata_size": 8,
    "tensor": TENSOR,
    "tensors_list": [TENSOR, TENSOR],
    "tp_rank": 0,
    "tp_size": 2,
    "targets": ["elsewhere"],
    "source": "elsewhere",
    "target": "elsewhere",
    "file_name": "/nowhere/file",
}


def calls():
    for name, call in inspect.getmembers(MooncakeDistributedStore, inspect.isfunction):
        parameters = inspect.signature(call).parameters
        if not name.startswith("_") and any("key" in each for each in parameters):
            yield name, [*parameters][1:]


def keys_of(parameter, kind):
    key, other = (kind(text) for text in ("é", "b"))
    one, many, nested = key, [key, other], [[key], [other]]
    return nested if parameter == "all_keys" else many if parameter.endswith("keys") else one


@contextlib.contextmanager
def filled_store():
    """A store of values and tensors, and its memory."""
    with pool_file() as path, contextlib.closing(set_up(path)) as store:
        assert store.put_batch(["é", "b"], [bytes(100), bytes(200)]) == 0
        yield store, Memory(store)


def contents(store):
    return {name: store.get(name) for name in sorted(store._running().backend.names())}


def seen(answer):
    """An answer, comparable with that of another store."""
    if isinstance(answer, list | tuple):
        return [*map(seen, answer)]
    if isinstance(answer, dict):
        return {key: seen(value) for key, value in answer.items()}
    if isinstance(answer, torch.Tensor):
        return answer.tolist()
    plain = isinstance(answer, int | bytes | str | None)
    return answer if plain else type(answer).__name__


@pytest.mark.parametrize("name, parameters", list(calls()))
def test_every_call_accepts_bytes_keys(name, parameters, caplog):
    [parameter] = KEYS.intersection(parameters)
    found = []
    for kind in (str, str.encode, lambda text: bytearray(text.encode())):
        for is_named in (False, True):
            with filled_store() as (store, memory):
                p = memory.address
                places = {
                    "buffer_ptr": p,
                    "buffer_ptrs": [p, p + 1000],
                    "all_buffer_ptrs": [[p], [p + 1000]],
                    "metadata_buffer_ptr": p + 2000,
                }
                options = OTHERS | places | {parameter: keys_of(parameter, kind)}
                given = {each: options[each] for each in parameters if each in options}
                if "parts" in given:
                    positional = [given.pop(parameter), given.pop("parts")]
                elif not is_named and parameters[0] == parameter:
                    positional = [given.pop(parameter)]
                else:
                    positional = []
                caplog.clear()
                answer = getattr(store, name)(*positional, **given)
                logged = [record.getMessage() for record in caplog.records]
                found.append((seen(answer), logged, contents(store), memory.at(0, 4096)))
    assert all(one == found[0] for one in found[1:])
    assert not any("must be a string" in message for message in found[0][1])


def test_keys_that_are_not_utf8_are_rejected(store, caplog):
    for key in (b"\xff", b"a\xc3", b"\xed\xa0\x80"):
        assert store.put(key, b"1") == INVALID_PARAMS
        assert f"key must be a string, got {key!r}" in caplog.text
        assert store.batch_is_exist([key, "a"]) == [-1, -1]


def test_lists_of_any_kind(store):
    assert store.put_batch(("a", b"b"), (b"1", b"2")) == 0
    for keys in (np.array(["a", "b"]), np.array([b"a", b"b"]), np.array(["a", b"b"], object)):
        assert store.batch_is_exist(keys) == [1, 1]
        assert store.get_batch(keys) == [b"1", b"2"]
    endless = ["a"]
    endless.append(endless)
    assert store.batch_is_exist(endless) == [-1, -1]
