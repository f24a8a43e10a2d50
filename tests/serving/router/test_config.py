import math

import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.conductor import Role
from mooncake_serving.router import load_config
from mooncake_serving.router.__main__ import main
from mooncake_serving.router.config import ClassConfig, CopiesConfig

GOOD = """
host = "0.0.0.0"
port = 9000
connector = "mooncake_kernels"
block_size = 32
api_keys_file = "KEYS"
[admission]
ttft_s = 5
rule = "predictive"
limits = {"0" = 1.0, "5" = 0.5}
[admission.classes.batch]
ttft_s = 60
[costs]
prefill = [0.1, 1e-4, 0]
[store]
kv_bytes_per_token = 131072
bytes_per_s = 2e10
[store.copies]
rate_per_holder = 0.5
[registry]
url = "redis://10.0.0.9:6379/0?prefix=ours/"
namespace = "prod"
password_file = "KEYS"
[[instance]]
name = "p0"
role = "prefill"
url = "http://10.0.0.1:8100/"
events = "tcp://10.0.0.1:5557"
replay = "tcp://10.0.0.1:5558"
[[instance]]
name = "d0"
role = "decode"
url = "http://10.0.0.2:8200"
capacity_tokens = 100000
"""


@pytest.fixture
def written(tmp_path):
    (tmp_path / "KEYS").write_text("one\ntwo\n")

    def write(text: str):
        path = tmp_path / "router.toml"
        path.write_text(text.replace("KEYS", str(tmp_path / "KEYS")))
        return path

    return write


def test_a_file_is_read(written):
    config = load_config(written(GOOD))
    assert (config.host, config.port, config.connector) == ("0.0.0.0", 9000, "mooncake_kernels")
    assert config.api_keys == ("one", "two")
    assert config.admission.ttft_s == 5 and math.isinf(config.admission.tbt_s)
    assert config.admission.limits == {0: 1.0, 5: 0.5}
    assert config.admission.classes == {"batch": ClassConfig(ttft_s=60, tbt_s=math.inf)}
    assert config.costs.prefill == (0.1, 1e-4, 0.0)
    assert config.store is not None and config.store.bytes_per_s == 2e10
    assert config.store.copies == CopiesConfig(rate_per_holder=0.5)
    assert config.registry is not None and config.registry.namespace == "prod"
    assert config.registry.url.login == ("", "one") and config.registry.url.prefix == "ours/"
    assert "one" not in repr(config.registry)
    prefill, decode = config.instances
    assert (prefill.role, prefill.url) == (Role.PREFILL, "http://10.0.0.1:8100")
    assert (decode.role, decode.capacity_tokens, decode.events) == (Role.DECODE, 100000, "")


@pytest.mark.parametrize(
    "line, by, message",
    [
        ("port = 9000", "port = 70000", "port must be an integer from 0 to 65535, got 70000"),
        ("port = 9000", "port = true", "port must be an integer from 0 to 65535, got True"),
        ("port = 9000", "prot = 9000", "prot must not be there: it is unknown: is port meant?"),
        ("ttft_s = 5", "ttft_s = 0", r"admission.ttft_s must be positive, got 0"),
        ("ttft_s = 5", "ttft = 5", r"admission.ttft must not be there.*is ttft_s meant"),
        ('"5" = 0.5', '"5" = 1.5', r"admission.limits.5 must be above 0 and at most 1, got 1.5"),
        ('"5" = 0.5', '"low" = 0.5', r"admission.limits.low must be a priority"),
        ("predictive", "lucky", r"admission.rule must be one of accept_all, .*got 'lucky'"),
        ("1e-4, 0]", "1e-4]", r"costs.prefill must be three numbers"),
        ("[0.1, 1e-4, 0]", "[0, 0, 0]", r"costs.prefill must be three numbers"),
        ("bytes_per_s = 2e10", "", r"store.bytes_per_s must be positive, got None"),
        ("rate_per_holder = 0.5", "rate = 1", r"store.copies.rate must not be there"),
        ("rate_per_holder = 0.5", "max_per_s = 0", r"store.copies.max_per_s must be positive"),
        ("rate_per_holder = 0.5", "max_holders = 0", r"store.copies.max_holders must be an int"),
        ('role = "decode"', 'role = "decoder"', r"instance\[1\].role must be one of"),
        ('name = "d0"', 'name = "p0"', r"instance.name must be unique, got 'p0' twice"),
        ('name = "d0"', "", r"instance\[1\].name must be a text, got None"),
        ("10.0.0.2:8200", "10.0.0.2:8200/v1", r"instance\[1\].url must be a URL.*without /v1"),
        ("http://10.0.0.2:8200", "10.0.0.2:8200", r"instance\[1\].url must be a URL"),
        ("tcp://10.0.0.1:5557", "10.0.0.1:5557", r"instance\[0\].events must be a ZeroMQ endpoint"),
        ('events = "tcp://10.0.0.1:5557"', "", r"instance\[0\].replay must be given only with"),
        ('connector = "mooncake_kernels"', 'connector = "mooncake"', "instance.bootstrap must be"),
        ("[costs]", "[[costs]]", "costs. must be a table, got .{"),
        ("[[instance]]", "[[instance]", "the file must be TOML"),
        ("port = 9000", f"port = {'9' * 5000}", "the file must be TOML"),
        ("ttft_s = 5", f"ttft_s = 1{'0' * 400}", r"admission.ttft_s must be positive, got 1000"),
        ("ttft_s = 5", "ttft_s = nan", r"admission.ttft_s must be positive, got nan"),
        ("[0.1, 1e-4, 0]", f"[1{'0' * 400}, 0, 0]", r"costs.prefill must be three numbers"),
        ('"5" = 0.5', '"5" = 0.5, "05" = 1.0', r"admission.limits.05 must be a priority"),
        ('"5" = 0.5', '" 5" = 0.5', r"admission.limits. 5 must be a priority"),
        ('name = "d0"', 'name = "dö"', r"instance\[1\].name must be printable ASCII without"),
        ('name = "d0"', 'name = "d;0"', r"instance\[1\].name must be printable ASCII without"),
        ("10.0.0.2:8200", "10.0.0.2:82000", r"instance\[1\].url must be a URL"),
        ("10.0.0.2:8200", "10.0.0.2:port", r"instance\[1\].url must be a URL"),
        ("10.0.0.2:8200", "10.0.0.2:8200/#a", r"instance\[1\].url must be a URL"),
        ("10.0.0.2:8200", "a b:8200", r"instance\[1\].url must be a URL"),
        ("10.0.0.2:8200", "a..b:8200", r"instance\[1\].url must be a URL"),
        ("10.0.0.2:8200", f"{'a' * 70}:8200", r"instance\[1\].url must be a URL"),
        ("10.0.0.1:5557", "10.0.0.1", r"instance\[0\].events must be a ZeroMQ endpoint"),
        ("10.0.0.1:5557", "*:5557", r"instance\[0\].events must be a ZeroMQ endpoint"),
        ("10.0.0.1:5558", "10.0.0.1:99999", r"instance\[0\].replay must be a ZeroMQ endpoint"),
        ("classes.batch]", 'classes."a;b"]', r"admission.classes.a;b must be named in printable"),
        ("classes.batch]", "classes.batch.x]", r"admission.classes.batch.x must not be there"),
        ("ttft_s = 60", "ttft_s = 0", r"admission.classes.batch.ttft_s must be positive, got 0"),
        ("port = 9000", "max_instances = 1", r"max_instances must be at least .* 2, got 1"),
        ('"prod"', '"a b"', "registry.namespace must be 1 to 100 of letters.*got 'a b'"),
        ("redis://", "p2p://", 'registry.url must be "redis://.*got a URL of another scheme'),
        ("redis://", "redis://:hush@", "registry.url must be without a login beside a password"),
        ('password_file = "KEYS"', 'password_env = "MK_NO"', "password_env must be an environment"),
        ("port = 9000", "max_held_bytes = 1", "max_held_bytes must be at least max_body_bytes"),
    ],
)
def test_a_wrong_entry_is_named(written, line, by, message):
    assert line in GOOD
    with pytest.raises(InvalidArgument, match=message):
        load_config(written(GOOD.replace(line, by)))


def test_the_engines_that_a_file_lacks_may_register(written):
    config = load_config(written(GOOD.replace('role = "decode"', 'role = "prefill"')))
    assert {instance.role for instance in config.instances} == {Role.PREFILL}


def test_the_command_checks_a_file(written, capsys):
    assert main(["--config", str(written(GOOD)), "--check"]) == 0
    assert "2 instances" in capsys.readouterr().out
    assert main(["--config", str(written(GOOD.replace("port = 9000", "port = -1")))]) == 2
    assert "port must be an integer" in capsys.readouterr().err


def test_a_file_of_keys_must_have_keys(written, tmp_path):
    path = written(GOOD)
    for content in (b"\n", b"\xff\xfe\x00k", "schlüssel".encode()):
        (tmp_path / "KEYS").write_bytes(content)
        with pytest.raises(InvalidArgument, match="api_keys_file must be a file with a key"):
            load_config(path)
