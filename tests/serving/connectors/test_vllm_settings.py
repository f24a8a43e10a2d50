"""The connector's configuration, and the module where vLLM is missing."""

import importlib.util

import pytest

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_serving.connectors import vllm
from mooncake_serving.connectors.vllm.settings import Settings, open_store, parse


def test_settings_and_their_defaults():
    assert parse({"pool": "/dev/shm/kv"}) == Settings("/dev/shm/kv", 0, "", 0.0, False)
    config = {"pool": "p", "capacity_bytes": 1 << 30, "namespace": "team", "verify": 1}
    assert parse(config) == Settings("p", 1 << 30, "team", 1)


@pytest.mark.parametrize(
    "config, message",
    [
        ({}, "must have 'pool', the path of the store's pool, got {}"),
        ({"pool": ""}, "must have 'pool'"),
        ({"pool": 3}, "'pool' must be str, got 3"),
        ({"pool": "p", "capacity_bytes": "1G"}, "'capacity_bytes' must be int, got '1G'"),
        ({"pool": "p", "capacity_bytes": True}, "'capacity_bytes' must be int, got True"),
        ({"pool": "p", "capacity_bytes": -1}, "'capacity_bytes' must be at least 0, got -1"),
        ({"pool": "p", "verify": "always"}, "'verify' must be float, got 'always'"),
        ({"pool": "p", "adapters_by_name": 1}, "'adapters_by_name' must be bool, got 1"),
        ({"pool": "p", "path": "q"}, "must have no others than pool, .*, got 'path'"),
    ],
)
def test_bad_settings_are_rejected(config, message):
    with pytest.raises(InvalidArgument, match=f"^kv_connector_extra_config: {message}"):
        parse(config)


def test_first_engine_creates_the_pool_and_others_open_it(tmp_path):
    path = str(tmp_path / "kv")
    with pytest.raises(InvalidArgument, match=f"'capacity_bytes' must be given, .* no {path} yet"):
        open_store(Settings(path), "m")
    with (
        open_store(Settings(path, 8 << 20), "m") as first,
        open_store(Settings(path), "m") as second,
        open_store(Settings(path, 1 << 20), "other model") as third,
        open_store(Settings(path, namespace="team"), "m") as fourth,
    ):
        first.put(1, b"one")
        assert second.get(1) == b"one"
        assert third.get(1) is None and fourth.get(1) is None


def test_missing_vllm_is_reported():
    with pytest.raises(AttributeError, match="no attribute 'Connector'"):
        vllm.Connector  # noqa: B018
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(Unavailable, match="^StoreConnector: vLLM must be installed: No module"):
            vllm.StoreConnector  # noqa: B018
