"""Random requests at once, whole, streamed, handed over, left: on engines with few blocks."""

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from mooncake_serving.serve import transfers
from tests.serving.serve.support import EngineServer, events_of, text_of
from tests.waiting import eventually

NUM_BLOCKS = 24
BEGINNINGS = ["", "the end of the inner sea ", "1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 "]
KINDS = ("whole", "stream", "leave", "handed", "handed", "handed and left", "unfetched")
PREFILL = {"do_remote_decode": True}


class Load:
    """What one client after the other does with a prefill and a decode engine."""

    def __init__(self, seed: int, prefill: EngineServer, decode: EngineServer, expected):
        self.draw = random.Random(seed)
        self.prefill, self.decode, self.expected = prefill, decode, expected
        self.num_compared = 0

    def requests(self, count: int) -> list[tuple[str, int, str]]:
        """Draw prompts, numbers of tokens and what is done with them."""
        draw = self.draw
        return [
            (
                draw.choice(BEGINNINGS) + "".join(draw.choices("abcdefgh", k=draw.randint(2, 30))),
                draw.randint(1, 40),
                draw.choice(KINDS),
            )
            for _ in range(count)
        ]

    def run(self, prompt: str, max_tokens: int, kind: str) -> None:
        engine, more = self.decode, {}
        if kind in ("handed", "handed and left", "unfetched"):
            answer = self.prefill.complete(prompt, 1, kv_transfer_params=PREFILL)
            assert answer.status_code == 200, answer.text
            if kind == "unfetched":
                return
            more = {"kv_transfer_params": answer.json()["kv_transfer_params"]}
        if kind in ("leave", "handed and left"):
            self.leave(engine, prompt, more)
            return
        answer = engine.complete(prompt, max_tokens, stream=kind == "stream", **more)
        if answer.status_code == 500:  # a prefill whose lease has ended, since blocks were short
            assert kind == "handed" and "asked for" in answer.text, answer.text
            return
        assert answer.status_code == 200, answer.text
        is_stream = kind == "stream"
        text = text_of(events_of(answer)) if is_stream else answer.json()["choices"][0]["text"]
        assert text == self.expected(prompt, max_tokens)[0]
        self.num_compared += 1

    def leave(self, engine: EngineServer, prompt: str, more: dict) -> None:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 60, "stream": True, **more}
        with engine.client.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines(), None)


@pytest.mark.parametrize(
    ("has_store", "pipeline"), [(False, 1), (True, 1), (True, 2)], ids=["", "store", "pipeline"]
)
def test_answers_are_those_of_an_engine_alone_and_no_block_is_lost(
    start, expected, monkeypatch, soak, tmp_path, has_store, pipeline
):
    num_requests = 2000 if soak else 80
    settings = replace(transfers.SETTINGS, lease_s=0.5)
    monkeypatch.setattr(transfers.Transfers.__init__, "__kwdefaults__", {"settings": settings})
    few = [f"--num-blocks={NUM_BLOCKS}"]
    if has_store:  # of which only a part of the blocks has room
        few.append(f"--store=shm:{tmp_path / 'kv'}?size=256KiB")
    prefill = start("--role=prefill", f"--pipeline={pipeline}", *few)
    decode = start("--role=decode", *few)
    load = Load(7, prefill, decode, expected)
    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(load.run, *one) for one in load.requests(num_requests)]
        for one in done:
            one.result()
    assert load.num_compared > num_requests // 4
    for engine in (prefill, decode):
        eventually(lambda engine=engine: engine.num_free_blocks == NUM_BLOCKS)
        assert engine.worker.engine.num_running == engine.worker.num_waiting == 0
    assert decode.worker.counts.cached_tokens > 0
    if pipeline > 1:  # a stage that dies while nothing is computed ends the engine, too
        os.kill(prefill.worker.engine.group.pids[0], signal.SIGKILL)
        eventually(lambda: prefill.client.get("/health").status_code == 503)
