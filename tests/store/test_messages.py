"""A wrong argument's message names the call, the argument, what it must be and what it was."""

import inspect
import re

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPool
from mooncake_serving.store import ClusterStore, SsdTier, Store, TieredStore
from mooncake_serving.store.directory import EmbeddedDirectory

from .cluster.support import UNIT, Hosts

GOOD = {
    "key": "a",
    "keys": ["a"],
    "value": b"value",
    "values": [b"value"],
    "parts": b"value",
    "objects": [[b"value"]],
    "buffers": np.zeros(8, np.uint8),
    "num_bytes": 8,
    "retention": "normal",
}
WRONG = {
    "key": [None, 1.5, True, -1, 1 << 64, "\ud800", [], [1], {}, np.zeros(2)],
    "keys": [
        *(None, 5, "a", b"abc", np.zeros((1, 3))),
        *([wrong] for wrong in (None, 1.5, 1.0, True, np.True_, -1, 1 << 64, [1], "\ud800")),
    ],
    "value": [None, "text"],
    "values": [None, [None]],
    "parts": [None, "text"],
    "objects": [None, [None], [[None]]],
    "buffers": [None, b"read only"],
    "num_bytes": [None, -1, 1.5, "x", []],
    "retention": [None, "x", "long", 0, []],
    "position": [None, -1, 1.5, "1", [1], True],
    "offset": [-1, 1.5, "x"],
    "puts": [None, 5, "puts", [None]],
    "preferred": ["host-1", [1], None, 5],
}
OF_EACH = {
    "begin_each": {"num_bytes": [8]},
    "get_into_each": {"buffers": [np.zeros(8, np.uint8)]},
}
WITHOUT_A_POOL = "ClusterStore without a pool"
# For this project's own layers.
INNER = (
    r".*_keys?|.*_headed|age_tail_first|check_puts|note_read|read_each|read_starts"
    r"|remove_damaged|remove_exactly|check_size"
)


def cases():
    for owner in (Store, TieredStore, ClusterStore):
        for name, call in inspect.getmembers(owner, inspect.isfunction):
            parameters = inspect.signature(call).parameters.keys()
            is_inner = name.startswith("_") or re.fullmatch(INNER, name)
            if not is_inner and {"key", "keys", "puts", "num_bytes"} & parameters:
                for parameter in sorted(parameters & WRONG.keys()):
                    yield owner.__name__, name, parameter
                    if owner is ClusterStore and name not in ("fetch", "view"):
                        yield WITHOUT_A_POOL, name, parameter


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    path = tmp_path_factory.mktemp("disk") / "disk"
    tier = SsdTier(path, 1 << 24, bucket_bytes=1 << 20)
    hosts = Hosts(EmbeddedDirectory())
    with Store.create(UNIT) as store, TieredStore(ObjectPool.create(UNIT), tier) as tiered:
        yield {
            "Store": store,
            "TieredStore": tiered,
            "ClusterStore": hosts.make("one").cluster,
            WITHOUT_A_POOL: hosts.make("two", 0).cluster,
        }
    hosts.close()


@pytest.mark.parametrize(("owner", "name", "parameter"), list(cases()))
def test_errors_name_call_argument_and_value(stores, owner, name, parameter):
    call = getattr(stores[owner], name)
    for wrong in WRONG[parameter]:
        if name == "get_into_each" and parameter == "buffers" and wrong is not None:
            wrong = [wrong]
        options = GOOD | OF_EACH.get(name, {}) | {parameter: wrong}
        positional, named = [], {}
        for each in inspect.signature(call).parameters.values():
            if each.name in options:
                if each.kind is each.KEYWORD_ONLY or named:
                    named[each.name] = options[each.name]
                else:
                    positional.append(options[each.name])
        with pytest.raises(InvalidArgument) as raised:
            call(*positional, **named)
        message = str(raised.value)
        assert re.match(rf"{name}: {parameter}\b.* must .*, got ", message), message
    assert not stores[owner].exists("a")
