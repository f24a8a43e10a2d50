"""``serve up`` under load, whose engines are killed, or stopped for a while, at random moments."""

import contextlib
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from tests.serving.serve.support import WAIT_S, Up
from tests.waiting import eventually

NUM_CLIENTS = 6
NUM_TOKENS = 24
NUM_ENGINES = 4
BEGINNINGS = ["", "the end of the inner sea ", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 " * 3]
PROMPTS = [beginning + end for beginning in BEGINNINGS for end in ("a b", "c d e f g", "h " * 40)]
FAILED = (429, 500, 502, 503)


@pytest.fixture
def cluster(tiny_folder, tmp_path):
    with contextlib.closing(Up(tiny_folder, tmp_path, "--prefill=2", "--decode=2")) as up:
        yield up


class Client:
    """Asks for one answer after the other, whole or as a stream, until it is told to stop.

    Attributes:
        ended: how many requests ended how.
    """

    def __init__(self, up: Up, texts: dict[str, str], seed: int):
        self._draw, self._texts = random.Random(seed), texts
        self._url = up.url
        self.ended: Counter[str] = Counter()

    def run(self, stops: threading.Event) -> None:
        with httpx.Client(base_url=self._url, timeout=2 * WAIT_S) as client:
            while not stops.is_set():
                prompt = self._draw.choice(PROMPTS)
                if self._draw.random() < 0.5:
                    self._whole(client, prompt)
                else:
                    self._stream(client, prompt)

    def _whole(self, client: httpx.Client, prompt: str) -> None:
        answer = client.post("/v1/completions", json=body_of(prompt))
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == self._texts[prompt]
            self.ended["answered"] += 1
        else:
            self._failed(answer.status_code, answer.json())

    def _stream(self, client: httpx.Client, prompt: str) -> None:
        """What has come of a stream before an error is the beginning of the right answer."""
        with client.stream("POST", "/v1/completions", json=body_of(prompt, stream=True)) as answer:
            if answer.status_code != 200:
                answer.read()
                self._failed(answer.status_code, answer.json())
                return
            text = ""
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    assert text == self._texts[prompt]
                    self.ended["answered"] += 1
                    return
                event = json.loads(line.removeprefix("data: ")) if line else {}
                if "error" in event:
                    assert self._texts[prompt].startswith(text)
                    self.ended["ended within"] += 1
                    return
                text += "".join(choice["text"] for choice in event.get("choices", []))
        raise AssertionError(f"a stream ended without a last event, after {text!r}")

    def _failed(self, status: int, body: dict) -> None:
        assert status in FAILED, (status, body)
        assert body["error"]["message"]
        self.ended[f"refused: {status}"] += 1


def body_of(prompt: str, **more: bool) -> dict:
    return {"model": "tiny", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, **more}


def disturb(up: Up, draw: random.Random) -> None:
    """Kill an engine, or stop it and let it go on."""
    time.sleep(draw.uniform(0.05, 1.0))
    pids = [pid for pid in up.children() if pid != up.pid_of("router")]
    if not pids:
        return
    pid = draw.choice(pids)
    with contextlib.suppress(ProcessLookupError):
        if draw.random() < 0.8:
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(draw.uniform(0.1, 2.0))
            os.kill(pid, signal.SIGCONT)


def num_answered(clients: list[Client]) -> int:
    return sum(client.ended["answered"] for client in clients)


def has_failed(runs: list[Future[None]]) -> bool:
    return any(run.done() for run in runs)


def test_no_request_hangs_and_no_answer_is_wrong(cluster, expected, soak):
    num_kills, seed = (100, random.randrange(1 << 30)) if soak else (4, 1)
    texts = {prompt: expected(prompt, NUM_TOKENS)[0] for prompt in PROMPTS}
    clients = [Client(cluster, texts, seed + number) for number in range(NUM_CLIENTS)]
    draw, stops = random.Random(seed), threading.Event()
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        runs = [pool.submit(client.run, stops) for client in clients]
        try:
            for count in range(num_kills):
                disturb(cluster, draw)
                # Else all engines would be starting most of the time.
                eventually(lambda count=count: num_answered(clients) > count or has_failed(runs))
                assert not has_failed(runs)
        finally:
            stops.set()
        for run in runs:
            run.result()
    ended = sum((client.ended for client in clients), Counter())
    sys.stdout.write(f"seed {seed}: {dict(ended)}\n")

    def is_as_before() -> bool:
        with contextlib.suppress(httpx.HTTPError):
            instances = cluster.client.get("/instances").json()["instances"]
            return len(instances) == NUM_ENGINES and all(map(is_idle, instances))
        return False

    eventually(is_as_before)
    for prompt, text in texts.items():
        answer = cluster.client.post("/v1/completions", json=body_of(prompt))
        assert answer.json()["choices"][0]["text"] == text


def is_idle(instance: dict) -> bool:
    """Whether an engine is up, and holds nothing of any request."""
    if not instance["up"]:
        return False
    rows = dict(
        line.rsplit(" ", 1)
        for line in httpx.get(f"{instance['url']}/metrics").text.splitlines()
        if not line.startswith("#")
    )
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(float(rows[f"vllm:{name}"]) == 0 for name in names)
