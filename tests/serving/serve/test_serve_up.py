"""``serve up``: a cluster as its user has it, with servers that are killed."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.__main__ import main
from mooncake_serving.router import parse_config
from mooncake_serving.serve import options as serve_options
from mooncake_serving.serve import up as up_command
from mooncake_serving.serve.children import Port
from tests.serving.router.support import RouterServer
from tests.serving.serve.support import COMMAND, WAIT_S, Up, events_of, text_of
from tests.waiting import eventually

PROMPTS = ["the end", "in the inner 12, " * 6, "the " * 50, "a b c", "the end"]


@pytest.fixture(scope="module")
def up(tiny_folder, tmp_path_factory):
    made = Up(tiny_folder, tmp_path_factory.mktemp("up"), "--pipeline=2")
    yield made
    made.close()


def test_command_that_it_prints_works(up):
    command = up.out[up.out.index("curl") :].replace("curl -N", "curl -sSN")
    ran = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=WAIT_S)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith('data: {"id":"chatcmpl-') and "data: [DONE]" in ran.stdout


def test_many_at_once_are_answered_as_by_one_engine(up, expected):
    with ThreadPoolExecutor(8) as pool:
        streams = [pool.submit(up.complete, prompt, stream=True) for prompt in PROMPTS]
        wholes = [pool.submit(up.complete, prompt) for prompt in PROMPTS]
        for prompt, stream, whole in zip(PROMPTS, streams, wholes, strict=True):
            text = expected(prompt, 10)[0]
            assert text_of(events_of(stream.result())) == text
            assert whole.result().json()["choices"][0]["text"] == text


def test_status_and_bench_ask_it(up, capsys):
    assert main(["serve", "status", "--url", up.url]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[:3] for row in rows[1:]] == [
        ["prefill-0", "prefill", "yes"],
        ["decode-0", "decode", "yes"],
    ]
    load = ["--num-prompts=6", "--request-rate=50", "--random-prefix-len=24", "--token-ids=3:260"]
    assert main(["serve", "bench", "--url", up.url, "--json", "--simulate", *load]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["completed"], report["not_answered"]) == (6, {})
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (6 * 88, 6 * 32)
    assert report["simulated"]["completed"] == 6
    # What is refused is counted: the context has 512 tokens.
    long = ["--random-input-len=600", "--num-prompts=2"]
    assert main(["serve", "bench", "--url", up.url, *long]) == 1
    assert "2 not answered: 400 context_length_exceeded" in capsys.readouterr().out


def test_stranger_cannot_reach_the_blocks(up):
    """The cluster's engines have a secret of their own."""
    instances = up.client.get("/instances").json()["instances"]
    [url] = (one["url"] for one in instances if one["role"] == "prefill")
    asked = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    body = {"model": "tiny", "prompt": "the end", **asked}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=WAIT_S)
    [name] = answer.json()["kv_transfer_params"]["remote_ranks"]
    for secret in (None, "another secret of the same kind"):
        with mk.TransferEngine(transports=["tcp"], secret=secret) as stranger:
            with pytest.raises(mk.TransferError, match="secret"):
                stranger.write(stranger.open(name), [], notify=b"hello").wait()


@pytest.mark.parametrize("role", ["decode", "prefill", "stage", "router"])
def test_killed_server_is_restarted_and_no_answer_is_wrong(up, expected, role):
    pid = up.pid_of(role)
    texts = {prompt: expected(prompt, 10)[0] for prompt in PROMPTS}
    with ThreadPoolExecutor(4) as pool:
        answers = [(prompt, pool.submit(up.complete, prompt)) for prompt in PROMPTS * 4]
        os.kill(pid, signal.SIGKILL)
        for prompt, answer in answers:
            try:
                got = answer.result()
            except httpx.TransportError:  # of the router
                assert role == "router"
                continue
            if got.status_code == 200:
                assert got.json()["choices"][0]["text"] == texts[prompt]
            else:
                assert got.status_code in (502, 503), got.text

    def answers_again() -> bool:
        try:
            return up.complete("the end").status_code == 200
        except httpx.TransportError:
            return False

    eventually(answers_again)
    eventually(lambda: up.pid_of(role) not in (None, pid))
    assert up.complete("the end").json()["choices"][0]["text"] == texts["the end"]
    assert "was killed by signal 9: restarted in" in up.err.read_text()


def test_ctrl_c_ends_all(up):
    """The last test of this cluster."""
    ended_by(up, signal.SIGINT)


def test_end_of_the_terminal_ends_all(tiny_folder, tmp_path):
    up = Up(tiny_folder, tmp_path)
    ended_by(up, signal.SIGHUP)
    up.client.close()


def ended_by(up: Up, number: int) -> None:
    children = up.children()
    assert len(children) == 3
    up.process.send_signal(number)
    assert up.process.wait(WAIT_S) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert "Traceback" not in up.err.read_text()


def test_children_end_with_a_parent_that_is_killed(tmp_path):
    (tmp_path / "router.toml").write_text(
        '[[instance]]\nname = "a"\nrole = "both"\nurl = "http://127.0.0.1:9"\n'
    )
    code = f"""
import os, sys, time
from mooncake_serving.serve.children import Child, Port
port = Port("test", "127.0.0.1", 0)
arguments = ["router", "--config", {str(tmp_path / "router.toml")!r}]
child = Child("router", arguments, port, os.environ, sys.stderr)
print(child.pid, port.url, flush=True)
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        try:
            pid, url = parent.stdout.readline().split()

            def is_serving() -> bool:
                try:
                    return httpx.get(f"{url}/health").status_code == 503
                except httpx.TransportError:
                    return False

            eventually(is_serving)
        finally:
            parent.kill()
    eventually(lambda: not Path(f"/proc/{pid}").exists())


def test_reserved_port_refuses_until_its_server_listens():
    port = Port("test", "127.0.0.1", 0)
    number = int(port.url.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", number))
    with pytest.raises(InvalidArgument, match=f"port must be free, got {number}"):
        Port("serve up", "127.0.0.1", number)
    for _ in range(2):  # one server after the other
        with port.bound() as bound:
            bound.listen()
            socket.create_connection(("127.0.0.1", number)).close()
            bound.accept()[0].close()
            with pytest.raises(InvalidArgument):
                Port("serve up", "127.0.0.1", number)
    port.close()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["up", "--prefill", "0"], "error: serve up: --prefill and --decode must be at least 1"),
        (["up", "--host", "nowhere.invalid"], "error: serve up: host must be an address"),
        (["up", "--num-cpus=2"], "error: serve up: --num-cpus must be left out without"),
        (["up", "--num-gpus=0.5"], "error: serve up: --num-gpus must be left out without"),
        (["up", "--ray-address=auto"], "error: serve up: --ray-address must be left out without"),
        (["status", "--url", "http://127.0.0.1:9"], "error: serve: http://127.0.0.1:9/instances"),
        (["status", "--url", "nonsense"], "error: serve: --url must be a URL"),
        (["bench", "--url", "http://127.0.0.1:9"], "error: serve: http://127.0.0.1:9/v1/models"),
        (["engine", "--model", "/nowhere", "--port", "0"], "error: load_model: path must be"),
        (["router", "--config", "/nowhere"], "error: [Errno 2] No such file"),
        (["engine", "--replay", "tcp://127.0.0.1:0"], "error: serve engine: --replay must be left"),
        (["engine", "--role=decode", "--pipeline=2"], "error: serve engine: --pipeline must be 1"),
        (["status", "--api-key-file", "/nowhere"], "error: [Errno 2] No such file"),
    ],
)
def test_user_error_is_one_line(arguments, error, capsys):
    assert main(["serve", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith(error) and told.count("\n") == 1


def test_missing_ray_is_named_with_its_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "mooncake_serving.serve.ray_cluster", raising=False)
    assert main(["serve", "up", "--cluster=ray"]) == 1
    wanted = "pip install 'mooncake-kernels[serving,router,ray]'"
    assert capsys.readouterr().err == f"error: ray is not installed: {wanted}\n"


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("--store=nonsense", "error: open_store: url must be"),
        ("--events=tcp://127.0.0.1:x", "error: EventPublisher: endpoint must"),
        ("--handoff-host=nowhere.invalid", "error: "),
    ],
)
def test_error_after_loading_is_one_line(option, error, tiny_folder, capsys):
    given = ["engine", f"--model={tiny_folder}", "--port=0", "--role=prefill", option]
    assert main(["serve", *given]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and told[0].startswith(error), told


def test_server_that_cannot_start_ends_all(tmp_path):
    command = [*COMMAND, "up", "--port=0", f"--model={tmp_path / 'nowhere'}"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT_S)
    assert ran.returncode == 2
    lines = ran.stderr.splitlines()
    assert any("error: load_model: path must be a .gguf file" in line for line in lines)
    assert lines[-1].startswith("error: serve up: ") and "ended with status 2" in lines[-1]


@pytest.mark.parametrize("command", ["up", "engine"])
@pytest.mark.parametrize("url", ["redis://:hush@host:6379/0", "redis://host?password=hush"])
def test_password_on_the_command_line_is_refused(command, url, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", command, "--store", url])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "--store: must be a URL without a login" in told and "password_file=" in told
    assert "hush" not in told


def test_threads_are_those_that_this_process_may_use_or_ray_reserves(monkeypatch):
    parser = argparse.ArgumentParser()
    serve_options.add_commands(parser)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7, 9, 11, 13})
    roles, on_ray = ["prefill", "decode"], ["--cluster=ray"]
    for given, threads in (
        ([], 3),
        (["--threads=7"], 7),
        (["--pipeline=2"], 2),
        (on_ray, 1),
        ([*on_ray, "--num-cpus=4"], 4),
        ([*on_ray, "--num-cpus=4", "--threads=7"], 7),
    ):
        arguments = up_command.engine_arguments(parser.parse_args(["up", *given]), roles)
        assert f"--threads={threads}" in arguments["prefill"]
    arguments = up_command.engine_arguments(parser.parse_args(["up", "--pipeline=2"]), roles)
    assert "--pipeline=2" in arguments["prefill"] and "--pipeline=1" in arguments["decode"]


def test_objectives_reach_the_router():
    parser = argparse.ArgumentParser()
    serve_options.add_commands(parser)
    given = ["up", "--ttft-s=0.5", "--admission=predictive", "--decode-s=3"]
    told = up_command.admission_of(parser.parse_args(given))
    assert told == {"rule": "predictive", "decode_s": 3.0, "ttft_s": 0.5}
    assert parse_config({"admission": told}).admission.ttft_s == 0.5


def test_status_and_bench_have_a_key(tmp_path, capsys):
    (tmp_path / "keys").write_text("a-key\n")
    content = {
        "api_keys_file": str(tmp_path / "keys"), "admin_keys_file": str(tmp_path / "keys"),
        "instance": [{"name": "a", "role": "both", "url": "http://127.0.0.1:9"}],
    }  # fmt: skip
    router = RouterServer(content)
    url = str(router.client.base_url)
    try:
        for command in (["status"], ["bench"]):
            assert main(["serve", *command, "--url", url]) == 2
            assert "401" in capsys.readouterr().err
        key = ["--api-key-file", str(tmp_path / "keys")]
        assert main(["serve", "status", "--url", url, *key]) == 1  # the engine is down
        assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["a", "both", "no"]
        assert main(["serve", "bench", "--url", url, *key]) == 2
        assert capsys.readouterr().err.endswith("/v1/models: it has none: no engine is up\n")
    finally:
        router.close()


def test_help_has_examples(capsys):
    for arguments in ([], ["up"], ["engine"], ["router"], ["status"], ["bench"]):
        with pytest.raises(SystemExit) as ended:
            main(["serve", *arguments, "--help"])
        assert ended.value.code == 0
        assert "python -m mooncake_serving serve" in capsys.readouterr().out
