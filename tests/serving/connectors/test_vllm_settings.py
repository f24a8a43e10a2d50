"""The connector's configuration, its store, and the module where vLLM is missing."""

import importlib.util

import pytest

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_serving.connectors import vllm
from mooncake_serving.connectors.vllm.settings import (
    Settings,
    acquire_store,
    parse,
    release_store,
    without_pool,
)  # fmt: skip


def test_settings_and_their_defaults():
    assert parse({"url": "shm:/dev/shm/kv"}) == Settings("shm:/dev/shm/kv", "", 1.0, False, 2)
    config = {"url": "shm:/p", "namespace": "team", "verify": 0, "num_threads": 4}
    assert parse(config) == Settings("shm:/p", "team", 0, False, 4)
    assert parse({"handoff": {}}) == Settings(handoff={})


@pytest.mark.parametrize(
    "config, message",
    [
        ({}, "must have 'url', which names the store, or 'handoff', got"),
        ({"url": ""}, "must have 'url'"),
        ({"url": 3}, "'url' must be str, got 'int'"),
        ({"pool": "/p"}, "'pool' must be part of 'url', such as \"shm:PATH\", got '/p'"),
        ({"url": "shm:/p", "capacity_bytes": 9}, "'capacity_bytes' must be part of 'url', such as"),
        ({"url": "shm:/p", "verify": "always"}, "'verify' must be float, got 'always'"),
        ({"url": "shm:/p", "verify": 2.0}, "'verify' must be from 0 to 1, got 2.0"),
        ({"url": "shm:/p", "adapters_by_name": 1}, "'adapters_by_name' must be bool, got 1"),
        ({"url": "shm:/p", "num_threads": 0}, "'num_threads' must be from 1 to 64, got 0"),
        ({"handoff": 3}, r"\['handoff'\] must be an object of settings, got 3"),
        ({"handoff": {"prot": 1}}, r"\['handoff'\] must have no others than .*, got \['prot'\]"),
        ({"url": "shm:/p", "path": "q"}, "must have no others than url, .*, got 'path'"),
    ],
)
def test_bad_settings_are_rejected(config, message):
    with pytest.raises(InvalidArgument, match=f"^kv_connector_extra_config:? ?{message}"):
        parse(config)


def test_bad_urls_are_rejected():
    with pytest.raises(InvalidArgument, match="^open_store: url must be"):
        parse({"url": "/dev/shm/kv"})


def test_process_opens_a_store_once(tmp_path):
    url = f"tiered:{tmp_path}/kv?memory=1MiB&disk=4MiB&pool={tmp_path}/pool"
    first, second = (acquire_store(url, "n", 1.0) for _ in range(2))
    other = acquire_store(url, "m", 1.0)
    assert first is second and other is not first
    release_store(first)
    assert not second.closed
    release_store(second)
    assert second.closed and not other.closed
    release_store(other)
    release_store(other)
    again = acquire_store(url, "n", 1.0)
    assert again is not first and not again.closed
    release_store(again)


def test_scheduler_of_a_cluster_offers_no_memory():
    url = "redis://host:6379/0?size=8GiB&cluster=a&engine=h:1&pool=/p&password_env=P"
    assert without_pool(url) == "redis://host:6379/0?cluster=a&password_env=P"
    assert without_pool("redis://host:6379/0?size=8GiB") == "redis://host:6379/0"


def test_missing_vllm_is_reported():
    with pytest.raises(AttributeError, match="no attribute 'Connector'"):
        vllm.Connector  # noqa: B018
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(Unavailable, match="^StoreConnector: vLLM must be installed: No module"):
            vllm.StoreConnector  # noqa: B018
