"""Engines that register at a router by themselves."""

import argparse

import httpx
import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.__main__ import main
from mooncake_serving.router import make_app, parse_config
from mooncake_serving.serve import announcement
from mooncake_serving.serve.options import add_commands
from tests.metadata.support import free_port
from tests.serving.router.support import MODEL, Engine, Served
from tests.waiting import eventually


def options(*more):
    parser = argparse.ArgumentParser()
    add_commands(parser)
    return parser.parse_args(["engine", *more])


def test_an_engine_registers_when_the_router_is_there_and_leaves_when_it_ends(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(announcement, "FIRST_S", 0.05)
    monkeypatch.setattr(announcement, "MOST_S", 0.1)
    key, port, engine = tmp_path / "admin", free_port(), Engine()
    key.write_text("of-admin\n")
    url = f"http://127.0.0.1:{port}"
    name = engine.url.removeprefix("http://")
    given = options("--register", url, "--admin-key-file", str(key))
    endpoints = {"events": engine.events.endpoint, "replay": engine.events.replay}
    announcement.Announcement(given).add_to(engine.app, name, **endpoints)
    engine.restart()
    app = make_app(parse_config({"health_s": 0.05, "admin_keys_file": str(key)}))
    router = Served(app, port)
    try:
        fleet = app.state.router.fleet
        eventually(lambda: len(fleet) == 1 and app.state.router.placement.is_up(next(iter(fleet))))
        [(_, instance)] = fleet.items()
        assert (instance.name, instance.url) == (name, engine.url)
        assert (instance.events, instance.replay) == (endpoints["events"], endpoints["replay"])
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 4}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        engine.close()
        assert len(fleet) == 0
    finally:
        engine.close()
        router.close()


@pytest.mark.parametrize(
    "given, message",
    [
        (["--register=nowhere"], "--register must be a URL like .*, got 'nowhere'"),
        (["--register=http://r:1", "--host=0.0.0.0"], "--handoff-host must be the address by"),
    ],
)
def test_an_option_that_cannot_be_announced_is_refused(given, message):
    with pytest.raises(InvalidArgument, match=message):
        announcement.Announcement(options(*given))


def test_a_key_without_a_router_is_refused(capsys):
    assert main(["serve", "engine", "--admin-key-file", "x"]) == 2
    assert "--admin-key-file must be left out without --register" in capsys.readouterr().err
