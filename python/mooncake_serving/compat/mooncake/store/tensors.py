"""Tensors of ``MooncakeDistributedStore``: a table of the calls that put and get them.

A tensor in host memory, with at most 8 axes, is a value with its dtype and shape: 128 bytes precede
its elements. It is the same in memory: what a ``get_..._into`` has filled a ``put_..._from`` takes.

With ``tp_size`` shard ``r`` of ``key`` is the value ``key_tp_r``, and with 1 the tensor is whole. A
put cuts a tensor, and stores all shards: it ignores ``tp_rank``.

With ``parallelism`` a tensor is stored whole, or as a shard for each TP rank; it is read in either
form, whichever it was stored in. Axes of the other kinds are a part of its name. What is stored:

======================================= ====================== ===========================
layout                                  ``tensor`` is          stored
======================================= ====================== ===========================
none                                    the whole tensor       it
``writer_partition``                    the whole tensor       this rank's shard
``parallelism`` of a tp axis alone      this rank's shard      it
``parallelism`` of a tp axis and others the whole tensor       this rank's shard
``parallelism`` without a tp axis       the whole tensor       it
======================================= ====================== ===========================

``_from`` of a parallelism with a tp axis takes the whole tensor, and stores all shards.
"""

import inspect
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from mooncake_kernels.buffers import as_buffer
from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.extras import needed_from

from ..codes import Failed
from .batches import Batches, Value, check_columns
from .buffers import too_small
from .codes import (
    FILE_NOT_FOUND,
    INVALID_PARAMS,
    OBJECT_NOT_FOUND,
    check_list,
    code_of,
    fill,
    log,
    or_else,
    returns_code,
    returns_instead,
)
from .naming import encoded
from .replicate_config import put_options
from .sessions import ReadSpec
from .setup import Setup
from .sharded_tensors import copied, read_tensor, shard_key, shards_of, value_of, values_of
from .tensor_layout import HEADER_BYTES, decode, describe, target_of

_DEFAULTS = {
    "config": None, "tp_rank": 0, "tp_size": 1, "split_dim": 0, "parallelism": None,
    "parallelisms": None, "writer_partition": None, "writer_partitions": None, "target": None,
    "targets": None,
}  # fmt: skip
_TP = "tp_rank tp_size split_dim"

# Parameters, and what is done. A name with ``upsert`` replaces an existing value, see ``upsert``;
# one with ``batch`` takes many, and returns a code, or a tensor, for each.
PUTS = {
    "put_tensor": ("key tensor", "Store a tensor: 0, -200 or -600."),
    "pub_tensor": ("key tensor config", "``put_tensor`` with a configuration."),
    "upsert_tensor": ("key tensor", "``put_tensor`` that replaces an existing value."),
    "upsert_pub_tensor": ("key tensor config", "``upsert_tensor`` with a configuration."),
    "batch_put_tensor": ("keys tensors_list", "``put_tensor`` for many: one code each."),
    "batch_pub_tensor": ("keys tensors_list config", "``pub_tensor`` for many."),
    "batch_upsert_tensor": ("keys tensors_list", "``upsert_tensor`` for many."),
    "batch_upsert_pub_tensor": ("keys tensors_list config", "``upsert_pub_tensor`` for many."),
    "put_tensor_from": (
        "key buffer_ptr size",
        "Store a tensor from memory: 0, -200; -600 if it is not a tensor, or not of this size.",
    ),
    "upsert_tensor_from": ("key buffer_ptr size", "``put_tensor_from`` that replaces a value."),
    "batch_put_tensor_from": ("keys buffer_ptrs sizes", "``put_tensor_from`` for many."),
    "batch_upsert_tensor_from": ("keys buffer_ptrs sizes", "``upsert_tensor_from`` for many."),
    "put_tensor_with_tp": (
        f"key tensor {_TP}",
        "Cut a tensor into ``tp_size`` equal shards, and store all of them: 0, -200 or -600.",
    ),
    "pub_tensor_with_tp": (f"key tensor config {_TP}", "The same with a configuration."),
    "batch_put_tensor_with_tp": (
        f"base_keys tensors_list {_TP}",
        "``put_tensor_with_tp`` for many: one code each.",
    ),
    "batch_pub_tensor_with_tp": (
        f"base_keys tensors_list config {_TP}",
        "``pub_tensor_with_tp`` for many.",
    ),
    "put_tensor_with_tp_from": (
        f"key buffer_ptr size {_TP}",
        "``put_tensor_with_tp`` of a whole tensor from memory.",
    ),
    "batch_put_tensor_with_tp_from": (
        f"base_keys buffer_ptrs sizes {_TP}",
        "``put_tensor_with_tp_from`` for many: one code each.",
    ),
}
for _op in ("put", "upsert"):
    _call = f"{_op}_tensor_with_parallelism"
    _layout, _layouts = (
        "parallelism config writer_partition",
        "parallelisms config writer_partitions",
    )
    PUTS |= {
        _call: (f"key tensor {_layout}", "Store a tensor, or a shard of it: 0, -200 or -600."),
        f"batch_{_call}": (f"keys tensors_list {_layouts}", f"``{_call}`` for many."),
        f"{_call}_from": (
            f"key buffer_ptr size {_layout}",
            "Store a whole tensor from memory, or shards of it: 0, -200 or -600.",
        ),
        f"batch_{_call}_from": (
            f"keys buffer_ptrs sizes {_layouts}",
            f"``{_call}_from`` for many: one code each.",
        ),
    }
GETS = {
    "get_tensor": (
        "key",
        "Return a copy of a tensor; None if there is none, or the value is something else.",
    ),
    "batch_get_tensor": ("keys", "``get_tensor`` for many."),
    "get_tensor_into": (
        "key buffer_ptr size",
        "Copy a tensor into memory, which may be larger than its value. Returns the tensor in that "
        "memory, which must outlive it; None if there is none, the value is something else, or the "
        "memory is too small.",
    ),
    "batch_get_tensor_into": (
        "keys buffer_ptrs sizes",
        "``get_tensor_into`` for many. None for all if the lists differ in length.",
    ),
    "get_tensor_with_tp": (f"key {_TP}", "Return the shard of a rank; None if there is none."),
    "batch_get_tensor_with_tp": ("base_keys tp_rank tp_size", "``get_tensor_with_tp`` for many."),
    "get_tensor_with_tp_into": (
        f"key buffer_ptr size {_TP}",
        "``get_tensor_into`` for a rank's shard.",
    ),
    "batch_get_tensor_with_tp_into": (
        "base_keys buffer_ptrs sizes tp_rank tp_size",
        "``get_tensor_with_tp_into`` for many.",
    ),
    "get_tensor_with_parallelism": (
        "key target",
        "Return a tensor, or a shard of it; None if there is none, or a part is missing.",
    ),
    "batch_get_tensor_with_parallelism": (
        "keys targets",
        "``get_tensor_with_parallelism`` for many; with ``targets`` key by key.",
    ),
    "get_tensor_with_parallelism_into": (
        "key buffer_ptr size target",
        "``get_tensor_with_parallelism`` into memory, as ``get_tensor_into`` does. If shards are "
        "missing, some elements may have been written there.",
    ),
    "batch_get_tensor_with_parallelism_into": (
        "keys buffer_ptrs sizes targets",
        "``get_tensor_with_parallelism_into`` for many, key by key.",
    ),
}


def tensor_call(op: str) -> Callable[..., Any]:
    """The method of the table with this name, of an object whose ``_tensors`` are ``Tensors``."""
    parameters, doc = (PUTS if op in PUTS else GETS)[op]
    names, is_batch = parameters.split(), op.startswith("batch_")
    run = getattr(Tensors, ("put" if op in PUTS else "get") + ("_each" if is_batch else ""))
    ordered = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=_DEFAULTS.get(name, inspect.Parameter.empty),
        )
        for name in ("self", *names)
    ]
    arguments = inspect.Signature(ordered[1:])

    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != len(names):
            bound = arguments.bind(*args, **kwargs)
            bound.apply_defaults()
            return run(self._tensors, op, bound.arguments)
        return run(self._tensors, op, dict(zip(names, args, strict=True)))

    method.__name__ = op
    method.__qualname__ = f"MooncakeDistributedStore.{op}"
    method.__doc__ = doc
    method.__signature__ = inspect.Signature(ordered)  # type: ignore[attr-defined]
    if op in PUTS:
        return returns_instead([INVALID_PARAMS])(method) if is_batch else returns_code(method)
    return returns_instead([None])(method) if is_batch else returns_instead(None)(method)


class Tensors:
    """What the calls of the table do, with their arguments by name, and those that are not in it.

    Those arguments of a batch which belong to its keys end with an "s" more.
    """

    def __init__(self, setup: Setup, batches: Batches):
        self._setup = setup
        self._batches = batches

    def put(self, op: str, given: dict[str, Any]) -> int:
        """Store a tensor."""
        backend, config = self._setup.running().backend, given.get("config")
        replace = "upsert" in op
        values = self._values(given)
        if "tp_size" in given or "parallelism" in given:
            return self._batches.put(op, [0], {0: values}, config, replace=replace)[0]
        put = backend.replace if replace else backend.put
        put(*values[0], put_options(config))
        return 0

    def put_each(self, op: str, given: dict[str, Any]) -> list[int]:
        """Store many tensors."""
        columns = _columns(given)
        layouts = [columns[name] for name in ("parallelism", "writer_partition") if name in columns]
        keys = columns.pop("key")
        values: dict[int, list[Value]] = {}
        none = (
            {} if "parallelisms" not in given else {"parallelism": None, "writer_partition": None}
        )

        def look_up(i: int) -> int:
            self._setup.running()
            if len(layouts) > 1:
                raise InvalidArgument("parallelisms or writer_partitions must be None, got both")
            one = {name: column[i] for name, column in columns.items()}
            values[i] = self._values(given | none | one | {"key": keys[i]})
            return 0

        if "tensor" in columns and "parallelisms" not in given:
            check_list("keys", keys)
            try:
                check_list("tensors_list", tensors := columns["tensor"])
                if len(keys) != len(tensors):
                    raise InvalidArgument(
                        f"tensors_list must be as many as keys, got {len(tensors)} and {len(keys)}"
                    )
            except InvalidArgument as error:
                log.error("%s: %s", op, error)
                return [INVALID_PARAMS] * len(keys)
        codes = self._batches.each(op, keys, [*columns.values()], look_up)
        config = given.get("config")
        return self._batches.put(op, codes, values, config, replace="upsert" in op)

    def get(self, op: str, given: dict[str, Any]) -> torch.Tensor | None:
        """Read a tensor: a new one, or in the caller's memory."""
        key = _name_of(given["key"], given)
        memory = None
        if "buffer_ptr" in given:
            memory = self._memory(given["buffer_ptr"], given["size"], writes=True)
        backend = self._setup.running().backend
        if "target" in given:
            encoded(key)  # refuses invalid names
            room = _new_memory if memory is None else partial(_part_of, memory)
            return read_tensor(op, backend, key, target_of(given["target"]), room)
        if memory is None:
            found = backend.view(key)
            return None if found is None else copied(found)
        num_bytes = backend.get_into(key, [memory])
        return None if num_bytes == OBJECT_NOT_FOUND else decode(memory[:num_bytes])

    def get_each(self, op: str, given: dict[str, Any]) -> list[torch.Tensor | None]:
        """Read many tensors: with a target key by key, all others in one call."""
        columns = _columns(given)
        keys = columns.pop("key")
        if "target" in columns or {"targets", "buffer_ptrs"} <= given.keys():
            return self._get_one_by_one(op, keys, columns)
        name_of = partial(_name_of, given=given)
        if "buffer_ptr" in columns:
            return self._get_into_each(op, keys, columns["buffer_ptr"], columns["size"], name_of)
        return self._batches.get(op, keys, copied, None, name_of)

    def get_into_tensor(self, op: str, key: str, tensor: Any) -> int:
        """Copy a tensor's elements into a packed one, which may be on a GPU: their bytes, or -704.

        Raises:
            InvalidArgument: it is of another dtype or shape, and nothing was copied.
        """
        buffer = as_buffer(tensor, argument="tensor")
        if not buffer.writable:
            raise InvalidArgument("tensor must be writable, got one that is not")
        backend = self._setup.running().backend
        [reading] = backend.open_each(op, [key])  # so that header and elements are of one value
        if isinstance(reading, int):
            return reading
        header = memoryview(bytearray(HEADER_BYTES))
        [code] = backend.read_ranges(op, [ReadSpec(reading, [0], [header])])
        if code < 0:
            return code
        dtype, shape, _ = describe(header, reading.num_bytes)
        found = getattr(tensor, "dtype", None), tuple(getattr(tensor, "shape", ()))
        if found != (dtype, shape):
            raise InvalidArgument(
                f"tensor must be {[*shape]} of {dtype}, got {[*found[1]]} of {found[0]}"
            )
        [code] = backend.read_ranges(op, [ReadSpec(reading, [HEADER_BYTES], [buffer])])
        return code

    def save(self, key: str, file_name: str | os.PathLike[str] | None) -> int:
        """Write a tensor into a safetensors file, by default of the key's name: 0.

        Raises:
            Failed: there is no such tensor.
            InvalidArgument, Unavailable: the file cannot be written.
        """
        path = _path(key if file_name is None else file_name)
        safetensors = _safetensors()
        if (
            tensor := or_else("get_tensor", lambda: self.get("", {"key": key}), lambda: None)
        ) is None:
            raise Failed(FILE_NOT_FOUND, f"there is no tensor of {key!r:.80}")
        try:
            safetensors.torch.save_file({key: tensor}, path)
        except (safetensors.SafetensorError, OSError, ValueError, KeyError) as error:
            raise InvalidArgument(f"{path!r:.200} cannot be written: {error}") from None
        return 0

    def load(self, key: str | None, file_name: Any) -> torch.Tensor:
        """Store a tensor of a safetensors file, unless the key has a value, and return it.

        Raises:
            TypeError: there is no file name.
            InvalidArgument, Unavailable, Failed: it cannot be read, or stored.
        """
        if file_name is None:
            raise TypeError("load_tensor_from_safetensor() missing 1 required argument 'file_name'")
        path = _path(file_name)
        name = path if key is None else key
        encoded(name)  # refuses invalid names
        safetensors = _safetensors()
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                tensor = _tensor_in(file, path, name, is_given=key is not None)
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise InvalidArgument(f"{path!r:.200} cannot be read: {error}") from None
        self.put("load_tensor_from_safetensor", {"key": name, "tensor": tensor})
        return tensor

    def _values(self, given: dict[str, Any]) -> list[Value]:
        """The values to be stored of one tensor."""
        key, is_from = given["key"], "buffer_ptr" in given
        layout = "parallelism" in given, "tp_size" in given
        if is_from:
            memory = self._memory(given["buffer_ptr"], given["size"], writes=False)
            tensor = decode(memory)
            if not any(layout):
                return [Value(key, [memory])]
        else:
            tensor = given["tensor"]
        if "tp_size" in given:
            return shards_of(key, tensor, given["tp_size"], given["split_dim"])
        if "parallelism" in given:
            places = given["parallelism"], given["writer_partition"]
            return values_of(key, tensor, *places, all_shards=is_from)
        return [value_of(key, tensor)]

    def _get_one_by_one(
        self, op: str, keys: Sequence[str], columns: dict[str, Any]
    ) -> list[torch.Tensor | None]:
        check_list("keys", keys)
        try:
            check_columns(keys, [*columns.values()])
        except InvalidArgument as error:
            log.error("%s: %s", op, error)
            return [None] * len(keys)

        def one(i: int) -> torch.Tensor | None:
            given = {name: column[i] for name, column in columns.items()}
            return self.get(op, {"key": keys[i], "target": None} | given)

        return [or_else(op, partial(one, i), lambda: None) for i in range(len(keys))]

    def _get_into_each(
        self,
        op: str,
        keys: Sequence[str],
        pointers: Sequence[int],
        sizes: Sequence[int],
        name_of: Callable[[str], str],
    ) -> list[torch.Tensor | None]:
        """Copy each key's tensor into its memory, all in one call."""
        for argument, column in (("keys", keys), ("buffer_ptrs", pointers), ("sizes", sizes)):
            check_list(argument, column)
        if not len(keys) == len(pointers) == len(sizes):
            raise InvalidArgument(
                f"buffer_ptrs and sizes must be as many as keys, got {len(pointers)}, "
                f"{len(sizes)} and {len(keys)}"
            )
        names: dict[int, str] = {}
        memories: dict[int, memoryview] = {}

        def look_up(i: int) -> int:
            name = name_of(keys[i])
            memories[i] = self._memory(pointers[i], sizes[i], writes=True)
            names[i] = name
            return 0

        codes = [code_of(op, partial(look_up, i)) for i in range(len(keys))]
        wanted, views = [*names.values()], [[memory] for memory in memories.values()]
        backend = self._setup.running().backend
        fill(op, codes, [*names], lambda: backend.get_into_each(op, wanted, views))
        return [
            None
            if num_bytes < 0
            else or_else(op, partial(decode, memories[i][:num_bytes]), lambda: None)
            for i, num_bytes in enumerate(codes)
        ]

    def _memory(self, pointer: int, size: int, *, writes: bool) -> memoryview:
        memory = self._setup.running().buffers.view(pointer, size, writes=writes)
        if not isinstance(memory, memoryview):
            raise InvalidArgument(f"buffer_ptr must be host memory, got {memory.location}")
        return memory


def _columns(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a batch that are lists, under the names that one of them has."""
    names = {
        "key": ("keys", "base_keys"), "tensor": ("tensors_list",), "buffer_ptr": ("buffer_ptrs",),
        "size": ("sizes",), "parallelism": ("parallelisms",), "target": ("targets",),
        "writer_partition": ("writer_partitions",),
    }  # fmt: skip
    found = {one: given[name] for one, many in names.items() for name in many if name in given}
    is_optional = {"parallelism", "writer_partition", "target"}
    return {
        one: value for one, value in found.items() if value is not None or one not in is_optional
    }


def _name_of(key: str, given: dict[str, Any]) -> str:
    """The name of the value that is read."""
    if "tp_size" not in given:
        return key
    return shard_key(key, given["tp_rank"], given["tp_size"])


def _new_memory(num_bytes: int) -> memoryview:
    return np.empty(num_bytes, np.uint8).data


def _part_of(memory: memoryview, num_bytes: int) -> memoryview:
    """The first bytes of memory, which may be larger."""
    if num_bytes > len(memory):
        raise InvalidArgument(too_small(num_bytes, len(memory)))
    return memory[:num_bytes]


def _tensor_in(file: Any, path: str, name: str, *, is_given: bool) -> torch.Tensor:
    """The tensor of this name, or the first."""
    names = [*file.keys()]
    if not names:
        raise InvalidArgument(f"{path!r:.200} must have a tensor, got none")
    if is_given and name not in names:
        log.warning("%.200r has no tensor %.80r: %.80r is loaded", path, name, names[0])
    # A copy: what is mapped does not outlive a truncation of the file.
    return file.get_tensor(name if name in names else names[0]).clone()


def _path(file_name: Any) -> str:
    try:
        path = os.fspath(file_name)
    except TypeError:
        path = None
    if not isinstance(path, str):
        raise InvalidArgument(f"file_name must be a path, got {file_name!r:.80}")
    return path


def _safetensors() -> Any:
    try:
        with needed_from("serving", __name__):
            import safetensors.torch
    except ModuleNotFoundError as error:
        raise Unavailable(str(error)) from None
    return safetensors
