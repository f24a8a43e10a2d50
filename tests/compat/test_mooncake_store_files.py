"""Tensors of ``MooncakeDistributedStore`` in safetensors files."""

import logging
import resource
import sys

import pytest
import torch

from mooncake_serving.compat.mooncake.store import (
    FILE_NOT_FOUND,
    INVALID_PARAMS,
    RPC_FAIL,
)

from .store_support import reasons

load_file = pytest.importorskip("safetensors.torch").load_file
save_file = pytest.importorskip("safetensors.torch").save_file

WRONG = INVALID_PARAMS
TENSOR = torch.arange(24.0).reshape(4, 6)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]
)
def test_save_and_load_safetensors(store, folder, dtype):
    tensor = (TENSOR % 2).to(dtype)
    assert store.put_tensor("é", tensor.t()) == 0
    path = folder / "a file"
    for file_name in (str(path), "a file", path, None):
        assert store.save_tensor_to_safetensor("é", file_name) == 0
        [(name, found)] = load_file(path if file_name else "é").items()
        assert name == "é" and found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), tensor.t().contiguous().view(torch.uint8))
        assert store.remove("é", True) == 0
        loaded = store.load_tensor_from_safetensor("é", file_name or "é")
        assert loaded.dtype == dtype
        assert torch.equal(store.get_tensor("é").view(torch.uint8), loaded.view(torch.uint8))
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("tensor", [torch.tensor(1.5), torch.empty(0, 3)])
def test_unusual_shapes(store, tensor):
    assert store.put_tensor("t", tensor) == 0
    assert store.save_tensor_to_safetensor("t") == 0
    assert torch.equal(store.load_tensor_from_safetensor("u", "t"), tensor)
    assert torch.equal(store.get_tensor("u"), tensor)


def test_tensor_is_selected_by_key_or_first(store, caplog):
    save_file({"b": -TENSOR, "a": TENSOR}, "two")
    assert torch.equal(store.load_tensor_from_safetensor("b", "two"), -TENSOR)
    assert not caplog.records
    assert torch.equal(store.load_tensor_from_safetensor("c", file_name="two"), TENSOR)
    [warning] = caplog.records
    assert warning.levelno == logging.WARNING
    assert warning.getMessage() == "'two' has no tensor 'c': 'a' is loaded"
    assert torch.equal(store.load_tensor_from_safetensor(file_name="two"), TENSOR)
    assert len(caplog.records) == 1
    names = sorted(store._running().backend.names())
    assert names == ["b", "c", "two"] and torch.equal(store.get_tensor("two"), TENSOR)


def test_load_does_not_replace_an_existing_value(store):
    save_file({"a": TENSOR}, "file")
    assert store.put_tensor("a", -TENSOR) == 0
    assert torch.equal(store.load_tensor_from_safetensor("a", "file"), TENSOR)
    assert torch.equal(store.get_tensor("a"), -TENSOR)


def test_a_loaded_tensor_outlives_its_file(store, folder):
    save_file({"a": torch.arange(1 << 16)}, "file")
    loaded = store.load_tensor_from_safetensor("a", "file")
    (folder / "file").write_bytes(b"")
    assert torch.equal(loaded, torch.arange(1 << 16))


def test_failed_save_keeps_the_old_file(store, folder, caplog):
    assert store.put_tensor("a", TENSOR) == 0 and store.save_tensor_to_safetensor("a") == 0
    assert store.upsert_tensor("a", torch.zeros(1 << 20)) == 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        code = store.save_tensor_to_safetensor("a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == WRONG
    reasons(caplog, "'a' cannot be written: .*File too large")
    assert [path.name for path in folder.iterdir()] == ["a"]
    assert torch.equal(load_file("a")["a"], TENSOR)


@pytest.mark.parametrize(
    ("call", "code", "reason"),
    [
        (lambda s: s.save_tensor_to_safetensor("none", "n"), FILE_NOT_FOUND, "no tensor of 'none'"),
        (lambda s: s.save_tensor_to_safetensor("bytes", "n"), FILE_NOT_FOUND, "of 'bytes'"),
        (lambda s: s.save_tensor_to_safetensor("t", "nowhere/n"), WRONG, "cannot be written"),
        (lambda s: s.save_tensor_to_safetensor("t", "."), WRONG, "cannot be written"),
        (lambda s: s.save_tensor_to_safetensor("t", ""), WRONG, "cannot be written"),
        (lambda s: s.save_tensor_to_safetensor("t", "a\0b"), WRONG, "cannot be written"),
        (lambda s: s.save_tensor_to_safetensor("t", 5), WRONG, "file_name must be a path, got 5"),
        (lambda s: s.save_tensor_to_safetensor(5), WRONG, "file_name must be a path, got 5"),
        (lambda s: s.save_tensor_to_safetensor(5, "n"), FILE_NOT_FOUND, "key must be a string"),
        (lambda s: s.save_tensor_to_safetensor("half", "n"), WRONG, "complex32"),
        (lambda s: s.load_tensor_from_safetensor("n", "none"), None, "'none' cannot be read"),
        (lambda s: s.load_tensor_from_safetensor("n", "."), None, "'.' cannot be read"),
        (lambda s: s.load_tensor_from_safetensor("n", "a\0b"), None, "cannot be read"),
        (lambda s: s.load_tensor_from_safetensor("n", "text"), None, "'text' cannot be read"),
        (lambda s: s.load_tensor_from_safetensor("n", "empty"), None, "must have a tensor, got no"),
        (lambda s: s.load_tensor_from_safetensor("n", "long"), None, "at most 8 axes"),
        (lambda s: s.load_tensor_from_safetensor("", "file"), None, "key must have 1 to"),
        (lambda s: s.load_tensor_from_safetensor(5, "file"), None, "key must be a string"),
        (lambda s: s.load_tensor_from_safetensor("n", 5), None, "file_name must be a path, got 5"),
        (lambda s: s.load_tensor_from_safetensor("n", "large"), None, "must fit into the pool"),
    ],
)
def test_invalid_arguments(store, folder, caplog, call, code, reason):
    (folder / "text").write_bytes(b"text" * 100)
    save_file({}, "empty")
    save_file({"n": torch.ones([1] * 9)}, "long")
    save_file({"n": torch.empty(80 << 20, dtype=torch.uint8)}, "large")
    save_file({"t": TENSOR}, "file")
    before = sorted(folder.iterdir())
    assert store.put_tensor("t", TENSOR) == 0 and store.put("bytes", b"abc") == 0
    assert store.put_tensor("half", torch.zeros(2, dtype=torch.complex32)) == 0
    assert call(store) == code
    reasons(caplog, reason)
    assert sorted(folder.iterdir()) == before and store.is_exist("n") == 0


def test_missing_file_name_raises_type_error(store):
    with pytest.raises(TypeError, match="missing 1 required argument"):
        store.load_tensor_from_safetensor("a")


def test_missing_safetensors_is_reported(store, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert store.put_tensor("t", TENSOR) == 0
    assert store.save_tensor_to_safetensor("t") == RPC_FAIL
    reasons(
        caplog, r"safetensors.torch is not installed: pip install 'mooncake-kernels\[serving\]'"
    )
    assert store.load_tensor_from_safetensor("t", "t") is None
    reasons(caplog, "is not installed")
