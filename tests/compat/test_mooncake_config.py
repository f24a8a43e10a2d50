"""``mooncake.mooncake_config``, and sizes in words."""

import json

import pytest

from mooncake_serving.compat.mooncake.mooncake_config import MooncakeConfig
from mooncake_serving.compat.mooncake.sizes import parse_size

NEEDED = {
    "local_hostname": "localhost",
    "metadata_server": "P2PHANDSHAKE",
    "master_server_address": "10.0.0.1:50051",
}


def write(folder, config) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (5, 5),
        (1.5, 1),
        ("1024", 1024),
        (" 3 GB ", 3 << 30),
        ("1.5kb", 1536),
        ("512k", 512 << 10),
        ("2Mb", 2 << 20),
        ("1t", 1 << 40),
        ("7b", 7),
        ("1e9", 10**9),
        (str(2**63 + 1), 2**63 + 1),
    ],
)
def test_sizes(value, size):
    assert parse_size(value) == size


@pytest.mark.parametrize(
    "value", ["", " ", "gb", "1 QB", "-1", "1gb2", "0x10", "nan", float("inf"), None, "1GB" * 9999]
)
def test_what_is_no_size(value):
    with pytest.raises(ValueError, match="room must be a number of bytes, or a text such"):
        parse_size(value, "room")


def test_defaults(tmp_path):
    config = MooncakeConfig.from_file(write(tmp_path, NEEDED))
    assert (config.global_segment_size, config.local_buffer_size) == (3355443200, 1 << 30)
    assert (config.protocol, config.device_name, config.tenant_id) == ("tcp", "", "default")
    assert (config.enable_ssd_offload, config.ssd_offload_path) == (False, "")
    assert (config.enable_client_http_server, config.client_http_port) == (False, 9300)


def test_file(tmp_path):
    given = NEEDED | {
        "global_segment_size": "16GB",
        "protocol": "RDMA",
        "enable_ssd_offload": "yes",
        "ssd_offload_path": None,
        "tenant_id": None,
        "client_http_port": "9301",
        "other": 1,
    }
    config = MooncakeConfig.from_file(write(tmp_path, given))
    assert config.global_segment_size == 16 << 30 and config.protocol == "rdma"
    assert config.enable_ssd_offload is True and config.client_http_port == 9301
    assert (config.ssd_offload_path, config.tenant_id) == ("", "default")


def test_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    monkeypatch.delenv("MOONCAKE_MASTER", raising=False)
    with pytest.raises(ValueError, match="'MOONCAKE_CONFIG_PATH' nor 'MOONCAKE_MASTER' is set"):
        MooncakeConfig.load_from_env()
    monkeypatch.setenv("MOONCAKE_MASTER", "10.0.0.1:50051")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "1g")
    config = MooncakeConfig.load_from_env()
    assert config.global_segment_size == 1 << 30 and config.metadata_server == "P2PHANDSHAKE"
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", write(tmp_path, NEEDED))
    assert MooncakeConfig.load_from_env().global_segment_size == 3355443200


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"metadata_server": None}, "Config field 'metadata_server': must be a non-empty string"),
        ({"protocol": ""}, "Invalid protocol: must be a non-empty string, got ''"),
        ({"local_buffer_size": -1}, "Invalid local_buffer_size: must be non-negative, got -1"),
        ({"enable_ssd_offload": "maybe"}, "flag must be true or false, got 'maybe'"),
        ({"global_segment_size": "much"}, "got 'much'"),
    ],
)
def test_wrong_fields(tmp_path, changes, reason):
    with pytest.raises(ValueError, match=reason):
        MooncakeConfig.from_file(write(tmp_path, NEEDED | changes))


@pytest.mark.parametrize("name", NEEDED)
def test_missing_fields(tmp_path, name):
    config = {key: value for key, value in NEEDED.items() if key != name}
    with pytest.raises(ValueError, match=f"Missing required config field: {name}"):
        MooncakeConfig.from_file(write(tmp_path, config))
