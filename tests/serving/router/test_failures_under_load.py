"""Many requests while engines fail, die and come back: no wrong answer, and nothing is left."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx

from tests.serving.router.support import APART, MODEL, WAIT_S, Engine
from tests.waiting import eventually

CLIENTS, REQUESTS = 4, 15
ERRORS = {429, 502, 503}


def outcome(url: str, seed: int) -> str:
    """Ask once; what comes is right, or an error, or the client leaves."""
    rng = random.Random(seed)
    prompt = f"{'shared ' * rng.randrange(20)}{seed}"
    body = {"model": MODEL, "prompt": prompt, "max_tokens": rng.randrange(1, 12)}
    body["stream"], leaves = rng.random() < 0.5, rng.random() < 0.2
    right = Engine._words(body)
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT_S) as answer:
        if leaves:
            return "left"
        text = answer.read().decode()
    if answer.status_code != 200:
        assert answer.status_code in ERRORS and json.loads(text)["error"]["message"]
        return "refused"
    if not body["stream"]:
        assert json.loads(text)["choices"][0]["text"] == " ".join(right)
        return "right"
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    words = [json.loads(one)["choices"][0]["text"] for one in events if '"choices"' in one]
    if events[-1] == "[DONE]":
        assert words == right
        return "right"
    assert "error" in json.loads(events[-1]) and words == right[: len(words)]
    return "broken"


def test_no_answer_is_wrong_and_nothing_is_left(cluster):
    router, engines = cluster(APART, max_attempts=4)
    done = threading.Event()

    def disturb() -> None:
        rng = random.Random(0)
        while not done.wait(0.02):
            engine, what = engines[rng.choice(list(APART))], rng.randrange(3)
            if what == 0:
                engine.restart()
                continue
            engine.fail_with, engine.die_after = (500, -1) if what == 1 else (0, 2)
            done.wait(0.1)
            engine.fail_with, engine.die_after = 0, -1

    disturbing = threading.Thread(target=disturb)
    disturbing.start()
    with ThreadPoolExecutor(CLIENTS) as executor:
        seeds = range(CLIENTS * REQUESTS)
        outcomes = list(executor.map(lambda seed: outcome(router.server.url, seed), seeds))
    done.set()
    disturbing.join()
    assert outcomes.count("right") > len(outcomes) // 4

    eventually(lambda: all(router.instance(name)["up"] for name in APART))
    assert router.complete("abc").status_code == 200
    eventually(lambda: not any(router.instance(name)["prefills"] for name in APART))
    state = router.router.placement.conductor.cluster
    for counter in (state.batch_size, state.kv_tokens, state.reserved_requests):
        eventually(lambda counter=counter: not counter.any())
    assert not state.reserved_tokens.any() and not state.num_sending.any()
    assert not router.router.placement._open and not router.router._attempts
