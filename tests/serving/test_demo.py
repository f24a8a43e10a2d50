"""``python -m mooncake_serving demo``, on servers in this process instead of its own."""

import re
from contextlib import ExitStack

import pytest
import torch

from mooncake_serving.__main__ import main
from mooncake_serving.demo import command, tour
from mooncake_serving.demo.alone import Alone
from mooncake_serving.demo.screen import BOLD, Screen
from mooncake_serving.demo.tour import OBJECTIVES_S, class_of
from mooncake_serving.serve.cluster import StartFailed
from tests.serving.conftest import write_folder
from tests.serving.router.support import RouterServer
from tests.serving.serve.support import EngineServer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that reads notes letter by letter."""
    config = {"max_position_embeddings": 4096}
    return write_folder(tmp_path_factory.mktemp("demo") / "model", config=config)


@pytest.fixture(scope="module")
def servers(folder):
    """Engines by their names, and a router."""
    with ExitStack() as stack:
        engines = {}
        for name, role in command.ENGINES.items():
            more = (f"--role={role}", f"--block-size={command.BLOCK_SIZE}", "--num-blocks=512")
            engines[name] = EngineServer(folder, *more, events=True)
            stack.callback(engines[name].close)
        instances = [
            {
                "name": name, "role": command.ENGINES[name], "url": engine.url,
                "events": engine.publisher.endpoint, "replay": engine.publisher.replay_endpoint,
            }
            for name, engine in engines.items()
        ]  # fmt: skip
        content = {
            "connector": "mooncake_kernels", "block_size": command.BLOCK_SIZE, "health_s": 0.1,
            "instance": instances,
            "admission": {"classes": {class_of(one): {"ttft_s": one} for one in OBJECTIVES_S}},
        }  # fmt: skip
        router = RouterServer(content)
        stack.callback(router.close)
        yield engines, router


@pytest.fixture
def demo(folder, servers, monkeypatch, capsys):
    """Runs the command with options on the servers; returns its status and what it wrote."""
    engines, router = servers

    class Cluster:
        failure: Exception | None = None
        url = router.server.url

        def __init__(self, roles, arguments, *, output, admission, **_):
            assert roles == command.ENGINES and f"--model={folder}" in arguments["prefill"]
            classes = {class_of(one): {"ttft_s": one} for one in OBJECTIVES_S}
            assert admission == {"classes": classes}
            output.write("prefill-0: what it told\n")

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def wait_until_ready(self):
            if self.failure is not None:
                raise self.failure

        def model(self):
            return "tiny"

        def event_endpoints(self, name):
            publisher = engines[name].publisher
            return publisher.endpoint, publisher.replay_endpoint

    def interrupted(cluster):
        raise KeyboardInterrupt

    def run(*options, **changes):
        for name, value in changes.items():
            monkeypatch.setattr(Cluster, name, value)
        status = main(["demo", f"--model={folder}", *options])
        return status, *capsys.readouterr()

    monkeypatch.setattr(command, "LocalCluster", Cluster)
    monkeypatch.setattr(command, "signals_as_ctrl_c", lambda: None)
    monkeypatch.setattr(command, "stay", interrupted)
    threads = torch.get_num_threads()
    yield run
    torch.set_num_threads(threads)


def test_it_shows_what_it_promises(demo, servers):
    status, out, errors = demo("--stay")
    assert (status, errors) == (0, ""), out
    assert BOLD not in out
    row = r"^ +{}, {} +\d+ +(\d+) +(prefill-\d) +decode-\d +\d+\.\d\d s"
    for note in ("kitchen", "lighthouse"):
        [(cold, there)] = re.findall(row.format(note, "cold"), out, re.MULTILINE)
        [(warm, again)] = re.findall(row.format(note, "warm"), out, re.MULTILINE)
        assert int(cold) < 100 < int(warm) and again == there, out
    assert "x-mooncake-decision: attempt=1; " in out and "why=ACCEPTED" in out
    assert re.search(r"prefill-\d: the shortest TTFT, .* tokens of its own cache", out)
    life = out[out.index("the first question about the kitchen arrives") :]
    assert re.search(r"prefill-\d +stored: computed here\n", life), out
    assert re.search(r"decode-\d +stored: moved here from prefill-\d\n", life), out
    assert re.search(r"prefill-\d +hit: \d later chats? began behind it", life), out
    assert re.search(r"[1-9]\d* were\s+refused before anything", out), out
    assert re.search(r"HTTP 429, Retry-After: \d+\n +overloaded for class within-", out), out
    assert "All 12 answers have the same tokens.\n" in out
    assert f"It stays up until Ctrl-C. The page: {servers[1].server.url}" in out


def test_other_tokens_are_told(demo, monkeypatch):
    answers = Alone.answers

    def wrong(alone, contents, max_tokens):
        first, *others = answers(alone, contents, max_tokens)
        return [[*first[:-1], "another"], *others]

    monkeypatch.setattr(Alone, "answers", wrong)
    monkeypatch.setattr(tour, "NUM_LESSONS", 0)
    monkeypatch.setattr(tour, "NUM_AT_ONCE", (1,))
    monkeypatch.setattr(tour, "OBJECTIVES_S", OBJECTIVES_S[-1:])  # none is refused
    status, out, _ = demo()
    assert status == 1 and "1 of 12 answers have other tokens.\n" in out
    assert re.search(r"\b0 were\s+refused", out) and "HTTP 429" not in out
    assert "make demo DEMO=--stay" in out


def test_what_servers_told_is_shown_if_one_fails(demo):
    status, _, errors = demo(url="http://127.0.0.1:9")
    assert status == 2
    told, error = errors.splitlines()
    assert told == "prefill-0: what it told"
    assert error.startswith("error: demo: a server has failed: ")
    ended = "serve up: decode-1 ended with status 2 before it was ready"
    status, _, errors = demo(failure=StartFailed(ended))
    assert (status, errors) == (2, f"{told}\nerror: {ended}\n")


def test_ctrl_c_ends_it(demo):
    status, _, errors = demo(failure=KeyboardInterrupt())
    assert (status, errors) == (130, "")


def test_missing_model_is_told_before_anything_starts(capsys):
    assert main(["demo", "--model", "/nowhere/model.gguf"]) == 2
    told = capsys.readouterr().err
    assert "'/nowhere/model.gguf', which does not exist" in told and told.count("\n") == 1


def test_headings_are_bold_on_a_terminal():
    class Terminal:
        text = ""

        def write(self, text):
            self.text += text

        def flush(self):
            pass

        def isatty(self):
            return True

    terminal = Terminal()
    screen = Screen(terminal)
    screen.head("A heading")
    screen.say("word " * 30, indent=4)
    head, *lines = terminal.text.splitlines()[1:]
    assert head == "\x1b[1m1. A heading\x1b[0m"
    assert [len(line) - len(line.lstrip()) for line in lines] == [4, 6]
    assert all(len(line) <= 100 for line in lines)
