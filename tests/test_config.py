"""Settings: defaults, the environment, and refusals."""

import pytest

from mooncake_kernels import config
from mooncake_kernels.__main__ import main
from mooncake_kernels.config import BuildSettings, Settings, read


def test_absent_variables_mean_defaults():
    assert read(Settings, {}) == Settings()
    assert read(BuildSettings, {"PATH": "/bin"}) == BuildSettings()


def test_the_environment_is_parsed():
    settings = read(
        Settings,
        {
            "MOONCAKE_KERNELS_THREADS": "3",
            "MOONCAKE_KERNELS_DEADLINE_S": "1.5",
            "MOONCAKE_KERNELS_REQUIRE": "cuda,rdma",
        },
    )
    assert settings == Settings(threads=3, deadline_s=1.5, require=("cuda", "rdma"))
    build = read(BuildSettings, {"MOONCAKE_KERNELS_CUDA_ARCHS": "90,100"})
    assert build.cuda_archs == ("90", "100")


@pytest.mark.parametrize(
    ("kind", "variable", "value"),
    [
        (Settings, "THREADS", "many"),
        (Settings, "THREADS", "-1"),
        (Settings, "LISTEN_HOST", ""),
        (Settings, "LISTEN_HOST", "10.0.0.1 10.0.0.2"),
        (Settings, "DEADLINE_S", "0"),
        (Settings, "DEADLINE_S", "nan"),
        (Settings, "DEADLINE_S", "inf"),
        (Settings, "METADATA_TTL_S", "0"),
        (Settings, "METADATA_TTL_S", "1e9"),
        (Settings, "REQUIRE", "cuda,quantum"),
        (BuildSettings, "CUDA", "yes"),
        (BuildSettings, "CUDA_ARCHS", "sm_90"),
        (BuildSettings, "SANITIZE", "memory"),
    ],
)
def test_malformed_value_raises_naming_variable_and_value(kind, variable, value):
    name = f"MOONCAKE_KERNELS_{variable}"
    with pytest.raises(ValueError, match=f"{name} must be .*, got '{value}'"):
        read(kind, {name: value})


def test_override_ends_with_its_block():
    before = config.current()
    with config.override(threads=7) as settings:
        assert settings.threads == config.current().threads == 7
    assert config.current() == before
    with pytest.raises(TypeError):
        config.override(no_such_setting=1).__enter__()


@pytest.mark.parametrize(
    "changes",
    [{"threads": "x"}, {"threads": -5}, {"threads": 1.5}, {"threads": True}, {"threads": 2**31},
     {"deadline_s": float("nan")}, {"listen_host": "a b"}, {"require": ("quantum",)},
     {"secret": None}, {"rdma_gid_index": -2}, {"rdma_traffic_class": 256},
     {"rdma_service_level": 16}],
)  # fmt: skip
def test_override_validates_like_the_environment(changes):
    before, (name,) = config.current(), changes
    with pytest.raises(ValueError, match=f"^override: {name} must be .*, got "):
        config.override(**changes).__enter__()
    assert config.current() is before
    with config.override(threads=0, deadline_s=5, require=("cuda",)) as settings:
        assert settings.threads == 0 and settings.deadline_s == 5


def test_config_table_lists_every_setting(capsys):
    assert main(["config"]) == 0
    table = capsys.readouterr().out
    for name in ("THREADS", "LISTEN_HOST", "DEADLINE_S", "CUDA_ARCHS", "SANITIZE"):
        assert f"| `MOONCAKE_KERNELS_{name}` |" in table
