"""examples/deploy: its commands are ours, and tools that know the formats of its files agree."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mooncake_serving.__main__ import main
from mooncake_serving.connectors.store_url import parse_store_url
from mooncake_serving.router.config import ROLES, RouterConfig, load_config
from mooncake_serving.serve import options as serve_options

from .pages import ROOT

DEPLOY = ROOT / "examples/deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
IMAGE = "mooncake-kernels"


def objects() -> dict[tuple[str, str], dict[str, Any]]:
    """The objects of the manifests, by kind and name."""
    every = [one for path in MANIFESTS for one in yaml.safe_load_all(path.read_text())]
    found = {(one["kind"], one["metadata"]["name"]): one for one in every}
    assert len(found) == len(every)
    return found


def parsed(command: list[str]) -> argparse.Namespace:
    assert command[0] == "serve"
    parser = argparse.ArgumentParser()
    serve_options.add_commands(parser)
    return parser.parse_args(command[1:])


def config_of(text: str, secrets: str, tmp_path: Path) -> RouterConfig:
    """What the router reads of a file whose keys lie elsewhere."""
    (tmp_path / "api-keys").write_text("a-key\n")
    (tmp_path / "router.toml").write_text(text.replace(secrets, str(tmp_path)))
    return load_config(tmp_path / "router.toml")


def check_engine(config: RouterConfig, name: str, host: str, options: argparse.Namespace) -> None:
    """The router's entry of an engine says what its command does."""
    [instance] = [one for one in config.instances if one.name == name]
    assert options.serve_command == "engine" and options.host == "0.0.0.0"
    assert instance.role == ROLES[options.role]
    assert instance.url == f"http://{host}:{options.port}"
    for here, there in ((options.events, instance.events), (options.replay, instance.replay)):
        assert there == here.replace("*", host) and "*" in here
    assert config.block_size == options.block_size
    store = parse_store_url(options.store)
    assert store.memory_bytes == 1 << 30 and store.engine == f"{options.handoff_host}:0"


def test_commands_of_compose_are_those_that_the_router_knows(tmp_path):
    config = config_of((DEPLOY / "router.toml").read_text(), "/run/secrets", tmp_path)
    assert config.api_keys == ("a-key",) and config.connector == "mooncake_kernels"
    services = COMPOSE["services"]
    ours = {n: parsed(one["command"]) for n, one in services.items() if one["image"] == IMAGE}
    router = ours.pop("router")
    assert services["router"]["volumes"] == [f"./router.toml:{router.config}:ro"]
    assert services["router"]["ports"] == [f"127.0.0.1:8000:{config.port}"]
    assert {one.name for one in config.instances} == set(ours)
    for name, options in ours.items():
        check_engine(config, name, name, options)
        assert services[name]["hostname"] == options.handoff_host == name
        assert f":{options.port}/health" in services[name]["healthcheck"]["test"][-1]


def test_commands_of_kubernetes_are_those_that_the_router_knows(tmp_path):
    found = objects()
    text = found["ConfigMap", "router"]["data"]["router.toml"]
    config = config_of(text, "/run/secrets/mooncake", tmp_path)
    assert config.api_keys == ("a-key",) and config.connector == "mooncake_kernels"
    names = set()
    for role in ("prefill", "decode"):
        engines, service = found["StatefulSet", role], found["Service", role]
        [container] = engines["spec"]["template"]["spec"]["containers"]
        options = parsed(container["args"])
        assert options.role == role == engines["spec"]["serviceName"]
        ports = {one["name"]: one["port"] for one in service["spec"]["ports"]}
        assert ports["http"] == options.port
        assert options.events.endswith(f":{ports['events']}")
        assert options.replay.endswith(f":{ports['replay']}")
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"] == {"path": "/health", "port": options.port}
        for index in range(engines["spec"]["replicas"]):
            check_engine(config, f"{role}-{index}", f"{role}-{index}.{role}", options)
            names.add(f"{role}-{index}")
    assert {one.name for one in config.instances} == names
    [router] = found["Deployment", "router"]["spec"]["template"]["spec"]["containers"]
    assert parsed(router["args"]).config == "/etc/mooncake/router.toml"
    assert router["ports"] == [{"containerPort": config.port}]


def test_each_object_selects_its_own_pods():
    for (kind, name), one in objects().items():
        if kind in ("Deployment", "StatefulSet"):
            template = one["spec"]["template"]["metadata"]["labels"]
            assert template == {"app": name, "part-of": "mooncake"}
            assert one["spec"]["selector"] == {"matchLabels": {"app": name}}
        elif kind == "Service":
            assert one["spec"]["selector"] == {"app": name}


def test_password_of_redis_is_in_no_command_line(tmp_path):
    """A program in place of redis-server tells what it is given."""
    (tmp_path / "redis").write_text("hush\n")
    (tmp_path / "redis-server").write_text('#!/bin/sh\necho "$@"; cat\n')
    (tmp_path / "redis-server").chmod(0o755)
    [container] = objects()["Deployment", "redis"]["spec"]["template"]["spec"]["containers"]
    for command in (container["command"], COMPOSE["services"]["redis"]["command"]):
        here = [word.replace("/run/secrets", str(tmp_path)) for word in command]
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        told = subprocess.run(here, env=path, capture_output=True, text=True, check=True).stdout
        assert told == "-\nrequirepass hush\n"


def test_entry_of_the_image_takes_these_commands(capsys):
    text = (DEPLOY / "Dockerfile").read_text()
    assert text.rstrip().endswith('ENTRYPOINT ["python", "-m", "mooncake_serving"]')
    for command in ("engine", "router"):
        with pytest.raises(SystemExit) as ended:
            main(["serve", command, "--help"])
        assert ended.value.code == 0
    assert "--handoff-host" in capsys.readouterr().out


def test_compose_file_fits_its_schema():
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema"]
    command += ["vendor.compose-spec", str(DEPLOY / "compose.yaml")]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_manifests_fit_their_schemas(path):
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    for one in yaml.safe_load_all(path.read_text()):
        validate.validate(one, validate.latest_version(), strict=True)
