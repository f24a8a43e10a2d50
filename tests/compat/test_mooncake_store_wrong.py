"""Arguments of all kinds: every call answers, and raises nothing but for their number and names."""

import contextlib
import inspect
import random

import numpy as np
import pytest
import torch

from mooncake_serving.compat.mooncake.store import (
    MooncakeDistributedStore,
    ReadTarget,
    ReplicateConfig,
    TensorParallelism,
)

from .store_support import pool_file, set_up

KIB = 1024
MEMORY = np.zeros(64 * KIB, np.uint8)
P = MEMORY.ctypes.data
VALUES = [
    None, True, 0, 1, 8, -1, 2**63, 2**64, -(2**70), 1.5, float("nan"), np.int64(-5), P, "", "k",
    "t", "(", "\ud800", "x" * 70_000, b"k", b"\xff", bytearray(b"k"), {}, {"a": 1}, set(), object(),
    int, lambda: 1, iter([1]), range(3), range(2**70), (), ("k",), [], [[]], [None], [5], ["k"],
    ["k", "j"], ["k", "k"], ["k", 5], ["k", ["j"]], ["k"] * 300, [b"k"], [P], [P, P], [8], [-1],
    [2**63], [[P]], [[8]], [[[0]]], [[[8]]], np.array(5), np.array([]), np.array(["k"]),
    np.array([P]), np.array([[1.5]]), np.zeros((4, 4))[:, 1], torch.zeros(2), torch.zeros(4, 4).T,
    torch.zeros(2, device="meta"), [torch.zeros(2)], [b"x"], ReplicateConfig(), ReadTarget(),
    TensorParallelism([]), [TensorParallelism([])], [None] * 2,
]  # fmt: skip
NOT_TRIED = {"setup", "setup_dummy", "close"}
CALLS = [
    name
    for name, _ in inspect.getmembers(MooncakeDistributedStore, inspect.isfunction)
    if name[0] != "_" and name not in NOT_TRIED
]


@pytest.fixture(scope="module")
def store():
    with pool_file() as path, contextlib.closing(set_up(path)) as store:
        assert store.register_buffer(P, MEMORY.nbytes) == 0
        yield store


@pytest.mark.parametrize("name", CALLS)
def test_every_call_survives_random_arguments(store, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some save files
    rng, call = random.Random(name), getattr(store, name)
    parameters = inspect.signature(call).parameters.values()
    needed = sum(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD
                 for one in parameters)  # fmt: skip
    given = sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in parameters)
    if name == "load_tensor_from_safetensor":  # of its file, None means that it is missing
        needed = 2
    for _ in range(150):
        store.put("k", b"12345678")
        store.put_tensor("t", torch.zeros(2))
        arguments = [rng.choice(VALUES) for _ in range(rng.choice([needed, given]))]
        if name != "load_tensor_from_safetensor" or arguments[1] is not None:
            call(*arguments)
    assert store.upsert("k", b"12345678") == 0 and store.get("k") == b"12345678"


@pytest.mark.parametrize("name", ["setup", "setup_dummy"])
def test_setup_survives_random_arguments(name):
    rng = random.Random(name)
    with pool_file() as path:
        right = {
            "setup": ["127.0.0.1", "P2PHANDSHAKE", 1 << 20, 1 << 20, "tcp", "", path],
            "setup_dummy": [1 << 20, 1 << 20, path],
        }[name]
        wrong = [value for value in VALUES if not isinstance(value, int) or value != 1]
        for _ in range(150):
            store, arguments = MooncakeDistributedStore(), list(right)
            arguments[rng.randrange(len(right))] = rng.choice(wrong)
            with contextlib.closing(store):
                assert getattr(store, name)(*arguments) <= 0
