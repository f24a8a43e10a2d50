"""The calls of ``MooncakeDistributedStore`` on values and keys, and their codes."""

import inspect
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from mooncake_serving.compat.mooncake.store import (
    INVALID_PARAMS,
    NO_AVAILABLE_HANDLE,
    OBJECT_NOT_FOUND,
    MooncakeDistributedStore,
    ReplicateConfig,
    SoftPinAction,
)
from mooncake_serving.compat.mooncake.store.codes import warn_once
from mooncake_serving.store import Store

from .store_support import CAPACITY, pool_file, reasons, set_up, value_of

TENSOR = torch.arange(8.0).view(4, 2)

WRONG, ABSENT, FULL = INVALID_PARAMS, OBJECT_NOT_FOUND, NO_AVAILABLE_HANDLE


@pytest.mark.parametrize("num_bytes", [1, 63, 64, 65, 4096, 1 << 20, 20 << 20])
def test_put_and_get_a_value(store, num_bytes):
    value = value_of(num_bytes, num_bytes)
    assert store.put("a", value) == 0
    assert store.get("a") == value
    assert bytes(store.get_buffer("a")) == value
    assert store.get_size("a") == num_bytes
    assert store.is_exist("a") == 1


@pytest.mark.parametrize("key", ["a", "k" * 4096, "ключ", "a\0b", "/x y/\n", "k" * 65536])
def test_keys_are_any_text(store, key):
    assert store.put(key, b"value") == 0
    assert store.get(key) == b"value"
    assert store.remove_by_regex("^" + key[0]) == 1
    assert store.is_exist(key) == 0


@pytest.mark.parametrize("value", [bytearray(b"abc"), memoryview(b"abc"), np.arange(3.0)])
def test_put_stores_all_bytes_of_a_buffer(store, value):
    assert store.put("a", value) == 0
    assert store.get("a") == bytes(value)


def test_an_existing_value_is_not_replaced(store):
    assert store.put("a", b"first") == store.put("a", b"second") == 0
    assert store.put_batch(["a", "b"], [b"third", b"b"]) == 0
    assert store.get_batch(["a", "b", "no"]) == [b"first", b"b", b""]


def test_upserts_replace(store):
    assert store.upsert("a", b"1") == 0
    assert store.upsert("a", b"22") == 0 and store.get("a") == b"22"
    assert store.upsert_parts("a", b"3", b"", b"33") == 0 and store.get("a") == b"333"
    assert store.upsert_batch(["a", "b"], [b"4", b"5"]) == 0
    assert store.get_batch(["a", "b"]) == [b"4", b"5"]
    assert store.upsert("a", b"") == WRONG and store.get("a") == b"4"
    assert store.upsert("a", bytes(CAPACITY)) == FULL and store.get("a") == b"4"


def test_parts(store):
    assert store.put_parts("p", b"ab", b"", np.frombuffer(b"cd", np.uint8)) == 0
    assert store.get("p") == b"abcd"
    assert store.put_parts("none") == store.put_parts("empty", b"", b"") == 0
    assert store.batch_is_exist(["none", "empty"]) == [0, 0]


def test_batches_of_removals(store):
    for key in ("a", "b", "c"):
        assert store.put(key, b"1") == 0
    assert store.batch_remove(["a", "no", "c", "a"]) == [0, ABSENT, 0, ABSENT]
    assert store.batch_remove([5, "b", "\ud800"]) == [WRONG, 0, WRONG]
    assert store.batch_is_exist(["a", "b", "c"]) == [0, 0, 0]
    assert MooncakeDistributedStore().batch_remove(["a", "b"]) == [WRONG, WRONG]


def test_absent_values(store, caplog):
    assert store.get("no") == b""
    assert store.get_batch(["no", "nor"]) == [b"", b""]
    assert store.get_buffer("no") is None and store.batch_get_buffer(["no"]) == [None]
    assert store.is_exist("no") == 0 and store.batch_is_exist(["no"]) == [0]
    assert store.get_size("no") == store.remove("no") == store.remove("no", True) == ABSENT
    assert store.batch_remove(["no"]) == [ABSENT]
    assert store.get_tensor("no") is None
    assert store.batch_is_exist([]) == store.get_batch([]) == store.batch_remove([]) == []
    assert store.remove_all() == store.remove_by_regex(".") == 0
    assert not caplog.records  # it is no error


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda s: s.put("", b"1"), "key must have 1 to"),
        (lambda s: s.put("k" * 65537, b"1"), "key must have 1 to"),
        (lambda s: s.put(5, b"1"), "key must be a string, got 5"),
        (lambda s: s.put("a", b""), "value must have at least 1 byte"),
        (lambda s: s.put("a", "text"), "value must be .* got str"),
        (lambda s: s.put("a", np.arange(8)[::2]), "packed"),
        (lambda s: s.put("a", b"1", {}), "config must be a ReplicateConfig"),
        (lambda s: s.put("a", b"1", ReplicateConfig(replica_num=0)), "replica_num must be"),
        (lambda s: s.put("a", b"1", ReplicateConfig(replica_num=1.0)), "replica_num must be"),
        (lambda s: s.put("a", b"1", ReplicateConfig(nof_replica_num=1)), "nof_replica_num"),
        (lambda s: s.put("a", b"1", ReplicateConfig(with_hard_pin=None)), "with_hard_pin must be"),
        (lambda s: s.put_batch(["a"], [b"1", b"2"]), "values must be as many as keys"),
        (lambda s: s.put_batch(["a", "b"], [b"1", b""]), r"got none in \[1\]"),
        (lambda s: s.put_parts("a", b"1", 5), "value must be"),
        (lambda s: s.remove_by_regex("("), "regex_pattern must be"),
        (lambda s: s.is_exist(b"\xff"), "key must be a string"),
        (lambda s: s.get_size(""), "key must have"),
        (lambda s: s.put_from("a", 1, np.zeros(2)), r"size must be an integer from 0 to"),
        (lambda s: s.put_from("a", 1, None), r"size must be an integer from 0 to"),
        (lambda s: s.put_tensor_with_tp("a", TENSOR, 0, np.zeros(2)), "tp_size must be an integer"),
        (lambda s: s.put_tensor_with_tp("a", TENSOR, 0, 0), "tp_size must be an integer from 1"),
    ],
)
def test_invalid_arguments_change_nothing(store, caplog, call, reason):
    assert call(store) == WRONG
    reasons(caplog, reason)
    assert store.remove_all() == 0


@pytest.mark.parametrize(
    ("rank", "size", "reason"),
    [
        (0, 0, "tp_size must be an integer from 1"),
        (0, np.zeros(2), "tp_size must be an integer from 1"),
        (-1, 2, "tp_rank must be an integer from 0"),
        (2, 2, "tp_rank must be below tp_size 2, got 2"),
    ],
)
def test_invalid_ranks(store, caplog, rank, size, reason):
    assert store.put_tensor_with_tp("a", TENSOR, 0, 2) == 0
    assert store.get_tensor_with_tp("a", rank, size) is None
    reasons(caplog, reason)
    caplog.clear()
    assert store.batch_get_tensor_with_tp(["a"], rank, size) == [None]
    reasons(caplog, reason)


def test_one_invalid_key_among_many(store, caplog):
    assert store.batch_is_exist(["a", 5]) == [-1, -1]
    reasons(caplog, "batch_is_exist: key must be a string")
    assert store.get(5) == b""
    reasons(caplog, "get: key must be a string")


def test_a_full_store_evicts_unpinned_values(store):
    pinned, soft = ReplicateConfig(with_hard_pin=True), ReplicateConfig()
    soft.soft_pin_action = SoftPinAction.ENABLE
    assert store.put("hard", bytes(8 << 20), pinned) == 0
    assert store.put("soft", bytes(8 << 20), soft) == 0
    for i in range(20):
        assert store.put(f"k{i}", bytes(8 << 20)) == 0
    assert store.batch_is_exist(["hard", "soft", "k0", "k19"]) == [1, 1, 0, 1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("soft_pin_action", True),
        ("soft_pin_action", 1),
        ("soft_pin_action", "ENABLE"),
        ("soft_pin_ttl_ms", "5"),
        ("soft_pin_ttl_ms", 5.0),
        ("soft_pin_ttl_ms", -1),
    ],
)
def test_a_soft_pin_of_a_wrong_type_is_refused_when_it_is_set(name, value):
    config = ReplicateConfig()
    before = getattr(config, name)
    with pytest.raises(TypeError, match=name):
        setattr(config, name, value)
    assert getattr(config, name) is before
    for right in (None, np.int64(5)):
        config.soft_pin_ttl_ms = right
        assert config.soft_pin_ttl_ms == right


def test_put_fails_when_nothing_can_be_evicted(store, caplog):
    pinned = ReplicateConfig(with_hard_pin=True)
    codes = [store.put(f"k{i}", bytes(20 << 20), config=pinned) for i in range(4)]
    assert codes == [0, 0, 0, FULL]
    reasons(caplog, "there is no room")
    assert store.put("huge", bytes(CAPACITY + 1)) == FULL
    assert store.batch_is_exist(["k0", "k3", "huge"]) == [1, 0, 0]


def test_buffer_handle_outlives_its_value(store):
    store.put("a", b"value")
    handle = store.get_buffer("a")
    assert store.remove("a") == 0
    assert handle and len(handle) == handle.size() == 5 and handle.ptr() == handle.ctypes.data
    store.close()
    assert bytes(memoryview(handle)) == b"value" and memoryview(handle).readonly


def test_buffer_handle_repr_and_identity_comparison(store):
    store.put_batch(["a", "b"], [b"value", b"value"])
    handle, other = store.batch_get_buffer(["a", "b"])
    shown = "<BufferHandle of 5 bytes>"
    assert repr(handle) == str(handle) == f"{handle}" == shown
    assert f"{handle:>30}" == shown.rjust(30)
    assert handle == handle and handle != other and handle is not None
    assert (handle == None) is (handle == b"value") is False  # noqa: E711
    assert handle in [other, handle] and len({handle, other, handle}) == 2


def test_buffer_handle_behaves_like_an_array(store):
    store.put("a", b"value")
    handle, plain = store.get_buffer("a"), np.frombuffer(b"value", np.uint8)
    for part, expected in ((handle[:4], plain[:4]), (handle + 1, plain + 1), (handle[::2], b"vle")):
        assert type(part) is np.ndarray and part.tolist() == list(expected)
        assert part.size == len(expected)
    assert handle[1] == handle[-4] == ord("a") and list(handle) == plain.tolist()
    assert np.mean(handle) == handle.mean() == plain.mean() and np.sum(handle) == plain.sum()
    assert handle.size == handle.size() == plain.size and type(handle.size()) is int
    assert np.array_equal(handle, plain) and np.equal(handle, plain).all()
    assert np.concatenate([handle, handle]).tobytes() == b"valuevalue"
    assert torch.frombuffer(bytearray(handle), dtype=torch.uint8).tolist() == plain.tolist()
    with pytest.raises(ValueError, match="read-only"):
        handle[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        handle[:2][0] = 1


def test_removal_by_regex_searches(store):
    for key in ("rx1", "rx2", "ry", "k-abc-1"):
        store.put(key, b"1")
    assert store.remove_by_regex("rx.") == 2
    assert store.remove_by_regex("abc", force=True) == 1
    assert store.remove_by_regex("^y") == 0
    assert store.remove_all() == 1


def test_tenants_are_isolated():
    with pool_file() as path:
        one, two = set_up(path), set_up(path, tenant_id="two")
        assert one.put("a", b"1") == two.put("a", b"2") == 0
        assert (one.get("a"), two.get("a")) == (b"1", b"2")
        assert one.remove_all() == 1 and two.get("a") == b"2"


def test_foreign_objects_in_the_pool_are_not_listed():
    with pool_file() as path:
        store = set_up(path)
        with Store.open(path, namespace="mooncake/default") as other:
            other.put("no header", b"1")
            other.put(b"short", b"")
        store.put("a", b"1")
        assert store.get("no header") == b"" and store.get_buffer("no header") is None
        assert store.remove_all() == 1


def test_before_setup_and_after_close(store, caplog):
    store.put("a", b"1")
    assert store.close() == store.close() == 0
    for one in (store, MooncakeDistributedStore()):
        caplog.clear()
        assert one.health_check() == 1 and one.get_hostname() == "" and one.close() == 0
        assert one.put("a", b"1") == one.get_size("a") == one.remove_all() == WRONG
        assert one.get("a") == b"" and one.get_buffer("a") is None and one.get_tensor("a") is None
        assert one.is_exist("a") == WRONG and one.batch_is_exist(["a"]) == [-1]
        assert one.put_from("a", 1 << 20, 8) == one.register_buffer(1 << 20, 8) == WRONG
        assert one.batch_get_into(["a"], [1 << 20], [8]) == [WRONG]
        reasons(caplog, "call setup first")


def test_values_outlive_the_store():
    with pool_file() as path:
        set_up(path).put("a", b"1")
        again = set_up(path, capacity=0)  # whatever is there
        assert again.get("a") == b"1" and again.health_check() == 0
        assert again.close() == 0


SETTINGS = {"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE"}


def test_setup_by_dict():
    with pool_file() as path:
        store = MooncakeDistributedStore()
        sizes = {"global_segment_size": str(1 << 20), "enable_ssd_offload": "false"}
        assert store.setup({**SETTINGS, **sizes, "master_server_addr": path}) == 0
        assert store.get_hostname() == "127.0.0.1"
        assert store.setup({**SETTINGS}) == 0  # it stays as it is
        assert os.path.getsize(path) < 8 << 20


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        ({"master_server_addr": "127.0.0.1:1"}, -900, "got 127.0.0.1:1: Connection refused; a"),
        ({"master_server_addr": "10.0.0.1"}, WRONG, "the host:port of a master, got '10.0.0.1'"),
        ({"master_server_address": "h:70000"}, WRONG, "the host:port of a master, got 'h:70000'"),
        ({"master_server_addr": "etcd://a:1;b:2"}, -900, "no client of etcd here, got etcd"),
        ({"metadata_server": ""}, -900, "or http://host:port/metadata, got nothing"),
        ({"local_buffer_size": "16 QB"}, WRONG, "a text such as \"16GB\", got '16 QB'"),
        ({"master_server_addr": "/dev/shm/none/there"}, -1, "none/there"),
        ({"master_server_addr": "/dev/shm/mk-none", "global_segment_size": 0}, WRONG, "above 0"),
        ({"local_hostname": 5}, WRONG, "local_hostname must be of type str, got 5"),
        ({"global_segment_size": "abc"}, WRONG, "global_segment_size must be a number of bytes"),
        ({"global_segment_size": 1.5}, WRONG, "global_segment_size must be of type int, got 1.5"),
        ({"client_http_port": "1GB"}, WRONG, "client_http_port must be of type int, got '1GB'"),
        ({"global_segment_size": -1}, WRONG, "must not be negative"),
        ({"enable_ssd_offload": "on"}, WRONG, "enable_ssd_offload must be True or False, got 'on'"),
        ({"enable_client_http_server": "on"}, WRONG, "http_server must be True or False, got 'on'"),
        ({"metadata_server": "etcd://1"}, -900, "no client of etcd"),
        ({"protocol": "cxl"}, -900, "protocol must be one of"),
    ],
)
def test_failed_setup_returns_error_code(monkeypatch, caplog, changes, code, reason):
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    store = MooncakeDistributedStore()
    assert store.setup(SETTINGS | changes) == code
    reasons(caplog, reason)
    assert store.health_check() == 1


def test_setup_by_dict_as_lmcache_passes_it(caplog):
    """Texts with the names of configuration files, and what is for a later Mooncake."""
    with pool_file() as path:
        store = MooncakeDistributedStore()
        texts = {"global_segment_size": "1.5 MB", "local_buffer_size": "16mb", "device_name": ""}
        texts |= {"master_server_address": path, "some_later_setting": "5", "ipc_socket_path": ""}
        assert store.setup({**SETTINGS, **texts}) == 0
        assert store.put("a", bytes(1 << 20)) == 0
        assert (1 << 20) < os.path.getsize(path) < 8 << 20
        store.close()
    assert "'some_later_setting' is ignored" in caplog.text and "ipc_socket" not in caplog.text


def test_setup_names_missing_arguments(caplog):
    store = MooncakeDistributedStore()
    assert store.setup({"local_hostname": "127.0.0.1"}) == WRONG
    reasons(caplog, "config must have metadata_server")
    with pytest.raises(TypeError, match=r"setup\(\) missing 6 required .* 'metadata_server'"):
        store.setup("127.0.0.1")


def test_unknown_setup_option_raises_type_error():
    """SGLang does, with each name that is part of the text."""
    store = MooncakeDistributedStore()
    with pool_file() as path:
        arguments = ("127.0.0.1", "P2PHANDSHAKE", CAPACITY, 0, "tcp", "", path)
        with pytest.raises(
            TypeError, match=r"setup\(\) got .* keyword argument 'enable_new_thing'"
        ):
            store.setup(*arguments, tenant_id="t", enable_new_thing=True)
        assert store.health_check() == 1
        assert store.setup(*arguments, tenant_id="t") == 0


def test_numpy_scalars_and_arrays_are_accepted():
    store = MooncakeDistributedStore()
    with pool_file() as path:
        settings = {"global_segment_size": np.int64(1 << 20), "protocol": np.str_("tcp")}
        settings |= {"master_server_addr": path, "enable_ssd_offload": np.bool_(False)}
        assert store.setup(config=SETTINGS | settings) == 0
        config = ReplicateConfig(replica_num=np.int64(1), with_hard_pin=np.bool_(True))
        config.nof_replica_num = np.uint8(0)
        assert store.put("r", b"1", config) == 0
        for keys in (np.array(["r", "no"]), np.array(["r", "no"], object), ("r", "no")):
            assert store.batch_is_exist(keys) == [1, 0]
            assert store.get_batch(keys) == [b"1", b""]


def test_argument_names_order_and_defaults_match_mooncake():
    def parameters(call) -> list[str]:
        return [
            f"{p.name}={p.default}" if p.default is not p.empty else p.name
            for p in list(inspect.signature(call).parameters.values())[1:]
        ]

    calls = MooncakeDistributedStore
    assert parameters(calls.put) == ["key", "value", "config=None"]
    assert parameters(calls.put_from) == ["key", "buffer_ptr", "size", "config=None"]
    assert parameters(calls.get_into) == ["key", "buffer_ptr", "size"]
    assert parameters(calls.batch_get_into) == ["keys", "buffer_ptrs", "sizes"]
    assert parameters(calls.remove) == ["key", "force=False"]
    assert parameters(calls.remove_by_regex) == ["regex_pattern", "force=False"]
    assert parameters(calls.batch_put_from_multi_buffers) == [
        "keys", "all_buffer_ptrs", "all_sizes", "config=None",
    ]  # fmt: skip
    assert parameters(calls.get_into_ranges) == [
        "buffer_ptrs", "all_keys", "all_dst_offsets", "all_src_offsets", "all_sizes",
    ]  # fmt: skip
    assert parameters(calls.batch_put_from_multi_buffer_ranges) == [
        "keys", "all_buffer_ptrs", "all_sizes", "all_dst_offsets",
    ]  # fmt: skip
    assert parameters(calls.batch_replica_clear) == ["keys", "segment_name="]
    assert parameters(calls.mount_segment) == [
        "path", "size", "offset=0", "protocol=tcp", "location=",
    ]  # fmt: skip
    assert not hasattr(calls, "init_all")


WITHOUT = """
import logging, sys
sys.modules["msgspec"] = sys.modules["redis"] = None
from mooncake_serving.compat.mooncake.store import MooncakeDistributedStore
settings = {"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE"}
store = MooncakeDistributedStore()
assert store.setup(settings | {"master_server_addr": sys.argv[1]}) == 0
assert store.put("a", b"1") == 0 and store.get("a") == b"1"
store.close()
assert store.setup(settings | {"master_server_addr": "redis://127.0.0.1:1"}) == -900
"""


def test_single_host_pool_needs_no_optional_packages():
    with pool_file() as path:
        command = [sys.executable, "-c", WITHOUT, path]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "not installed" in ran.stderr


def test_ignored_settings_are_logged_once(store, caplog):
    warn_once.cache_clear()
    configs = [
        ReplicateConfig(),
        ReplicateConfig(soft_pin_ttl_ms=1000),
        ReplicateConfig(group_ids=["g"], preferred_nof_segments=["n"]),
    ]
    expected = ["", "soft_pin_ttl_ms is ignored", "preferred_nof_segments is ignored"]
    for config, words in zip(configs, expected, strict=True):
        assert store.put("a", b"1", config) == store.put("b", b"2", config) == 0
        warnings = [one.getMessage() for one in caplog.records]
        assert sum(words in one for one in warnings) == bool(words), warnings
    assert len(caplog.records) == 3
    caplog.clear()
    for _ in range(2):
        with pool_file() as path:
            set_up(path, engine=object())
    assert caplog.text.count("engine is ignored") == 1


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"preferred_segment": 1}, "preferred_segment must be a string, got 1"),
        ({"preferred_segments": "abc"}, "preferred_segments must be a list of strings, got 'abc'"),
        ({"preferred_segments": [1]}, "preferred_segments must be a list of strings"),
    ],
)
def test_invalid_preferences(store, caplog, options, reason):
    assert store.put("a", b"1", ReplicateConfig(**options)) == WRONG
    reasons(caplog, reason)
    good = ReplicateConfig(preferred_segment="any", preferred_segments=["other"])
    assert store.put("a", b"1", good) == 0  # on one host there is one pool
