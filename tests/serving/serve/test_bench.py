"""``serve bench``: what it sends, what it measures, and what it says when things go wrong."""

import argparse
import asyncio
import io
import json
import math
from collections.abc import Iterable

import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from mooncake_serving.__main__ import main
from mooncake_serving.router.config import RULES
from mooncake_serving.serve import options as serve_options
from mooncake_serving.serve.bench import request as bench_request
from mooncake_serving.serve.bench.figures import figures_of
from mooncake_serving.serve.bench.load import Progress
from mooncake_serving.serve.bench.request import GARBAGE, NO_END, Answer, body_of, send
from mooncake_serving.serve.bench.workload import arrivals_s, workload_of
from mooncake_simulator.traces import TraceRequest, write_mooncake
from tests.serving.router.support import Served


def options_of(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve_options.add_commands(parser)
    return parser.parse_args(["bench", *arguments])


class Clock:
    """Time that passes as a server lets it."""

    def __init__(self):
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


class Stream(httpx.AsyncByteStream):
    """An answer whose parts come after given seconds."""

    def __init__(self, clock: Clock, parts: Iterable[tuple[float, str]]):
        self._clock, self._parts = clock, parts

    async def __aiter__(self):
        for seconds, data in self._parts:
            self._clock.now_s += seconds
            yield f"data: {data}\n\n".encode()


def text(what: str = "a") -> str:
    return json.dumps({"choices": [{"index": 0, "text": what}]})


def usage(prompt: int, completion: int, cached: int) -> str:
    told = {"prompt_tokens": prompt, "completion_tokens": completion}
    return json.dumps(
        {"choices": [], "usage": {**told, "prompt_tokens_details": {"cached_tokens": cached}}}
    )


@pytest.fixture
def answered(monkeypatch):
    """Sends one request, which is answered by given parts at given times."""
    clock = Clock()
    monkeypatch.setattr(bench_request, "time", clock)

    def ask(parts: Iterable[tuple[float, str]], **more) -> Answer:
        def reply(_: httpx.Request) -> httpx.Response:
            return httpx.Response(**{"status_code": 200, "stream": Stream(clock, parts), **more})

        async def run() -> Answer:
            transport = httpx.MockTransport(reply)
            async with httpx.AsyncClient(base_url="http://mock", transport=transport) as client:
                return await send(client, "/v1/completions", {}, 7, 90.0)

        return asyncio.run(run())

    return ask


def test_times_are_those_of_the_parts(answered):
    parts = [(0.5, text()), (0.1, text("")), (0.3, text()), (9.0, usage(11, 4, 8)), (0, "[DONE]")]
    one = answered(parts)
    assert one.error == "" and one.started_s == pytest.approx(10)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.itl_s == pytest.approx([0.1, 0.3])  # a token without a text is one
    assert one.latency_s == pytest.approx(0.9)
    assert (one.input_len, one.output_len, one.cached_len) == (11, 4, 8)
    assert one.tpot_s == pytest.approx(0.4 / 3)


def test_who_speaks_is_no_token_of_a_chat(answered):
    events = [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}]
    parts = [(0.2, json.dumps({"choices": [{"delta": event}]})) for event in events]
    one = answered([*parts, (0, "[DONE]")])
    assert (one.ttft_s, one.itl_s) == (pytest.approx(0.4), pytest.approx([0.2]))
    assert (one.input_len, one.output_len) == (7, 2)  # as it was sent, and as parts came


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([(0, text())], NO_END),
        ([(0, "[DONE]")], NO_END),
        ([(0, "{nonsense")], GARBAGE),
        ([(0, '{"choices": 3}')], GARBAGE),
        ([(0, "[1, 2]")], GARBAGE),
        ([(0, text()), (0, '{"error": {"code": "engine_failed"}}')], "stream: engine_failed"),
        ([(0, '{"error": "it broke"}')], "stream: it broke"),
    ],
)
def test_stream_that_is_not_whole_has_failed(answered, parts, error):
    assert answered(parts).error == error


@pytest.mark.parametrize("content", [b"<html>", b"", b"\xff\xfe", b'{"choices": []}'])
def test_answer_that_is_no_stream_is_garbage(answered, content):
    one = answered((), stream=None, content=content)
    assert one.error == GARBAGE and not one.is_refused


@pytest.mark.parametrize(
    ("status", "headers", "content", "error", "after"),
    [
        (429, {"retry-after": "3"}, b'{"error": {"code": "overloaded"}}', "429 overloaded", 3.0),
        (429, {"retry-after": "soon"}, b"later", "429", None),
        (400, {}, b'{"error": {"code": null, "type": "BadRequest"}}', "400 BadRequest", None),
        (500, {}, b'{"error": "no"}', "500 no", None),
        (502, {}, b"[" * 100_000, "502", None),
    ],
)
def test_refusal_has_its_reason(answered, status, headers, content, error, after):
    one = answered((), status_code=status, headers=headers, stream=None, content=content)
    assert (one.error, one.retry_after_s) == (error, after)
    assert one.is_refused == (status == 429) and not one.is_wasted_prefill


def test_refusal_of_our_router_has_its_decision(answered):
    refused = {"status_code": 429, "stream": None, "content": b'{"error": {"code": "overloaded"}}'}
    early = {"x-mooncake-decision": "attempt=1; prefill=p; why=DECODE_LOAD"}
    one = answered((), **refused, headers=early)
    assert one.error == "429 overloaded DECODE_LOAD" and not one.is_wasted_prefill
    late = {"x-mooncake-decision": "attempt=1; why=DECODE_LOAD; prefilled_s=0.1"}
    assert answered((), **refused, headers=late).is_wasted_prefill


def answer(ttft_s: float, gaps_s: list[float], started_s: float = 0.0) -> Answer:
    one = Answer(started_s, 10, ttft_s, gaps_s, ttft_s + sum(gaps_s))
    one.output_len = 1 + len(gaps_s)
    return one


def test_figures_are_those_of_known_times():
    answers = [answer(0.1 * i, [0.01 * i] * 4) for i in range(1, 11)]
    refused = Answer(0, 10, error="429 overloaded", is_refused=True, retry_after_s=2.0)
    late = Answer(
        0, 10, error="429 overloaded", is_refused=True, retry_after_s=4.0,
        decision={"prefilled_s": "1"},
    )  # fmt: skip
    failed = Answer(0, 10, error="ReadError")
    told = figures_of([*answers, refused, late, failed], 4.0, goodput_ms={}, percentiles=(90, 99))
    assert (told["completed"], told["failed"], told["refused"]) == (10, 3, 2)
    assert told["wasted_prefills"] == 1
    assert told["not_answered"] == {
        "429 overloaded": {"count": 2, "retry_after_s": 3.0},
        "ReadError": {"count": 1, "retry_after_s": None},
    }
    assert (told["total_input_tokens"], told["total_output_tokens"]) == (100, 50)
    assert told["request_throughput"] == 2.5 and told["output_throughput"] == 12.5
    assert told["total_token_throughput"] == 37.5 and told["request_goodput"] is None
    assert told["mean_ttft_ms"] == pytest.approx(550)
    assert told["median_ttft_ms"] == pytest.approx(550)
    assert told["p90_ttft_ms"] == pytest.approx(910)  # between the ninth and the tenth
    assert told["p99_ttft_ms"] == pytest.approx(991)
    assert told["std_ttft_ms"] == pytest.approx(100 * np.std(range(1, 11)))
    assert told["p99_tpot_ms"] == pytest.approx(99.1)
    assert told["median_itl_ms"] == pytest.approx(55)
    assert told["mean_e2el_ms"] == pytest.approx(550 + 4 * 55)


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        ({"ttft": 300}, 3),
        ({"ttft": 1000}, 10),
        ({"tpot": 50}, 6),  # five, and the one of a single token
        ({"ttft": 700, "tpot": 50}, 5),
        ({"e2el": 559.9}, 3),
        ({"ttft": 0}, 0),
    ],
)
def test_goodput_counts_who_meets_all(objectives, good):
    answers = [answer(0.1 * i - 1e-9, [0.01 * i - 1e-9] * 4) for i in range(1, 10)]
    answers.append(answer(0.99, []))
    failed = Answer(0, 10, error="ReadError")  # its times are all zero
    told = figures_of([*answers, failed], 2.0, goodput_ms=objectives, percentiles=())
    assert (told["good"], told["request_goodput"]) == (good, good / 2)


def test_figures_of_nothing_are_none():
    told = figures_of([Answer(0, 1, error="x")], 0.0, goodput_ms={"ttft": 1}, percentiles=(99,))
    assert told["p99_ttft_ms"] is None and told["mean_itl_ms"] is None
    assert told["request_goodput"] == 0


def test_one_token_has_no_time_a_token():
    told = figures_of([answer(0.1, [])], 1.0, goodput_ms={}, percentiles=())
    assert told["mean_tpot_ms"] is None and told["mean_ttft_ms"] == pytest.approx(100)


def test_arrivals_have_the_rate_and_the_burstiness():
    assert arrivals_s(3, math.inf, 1.0, 0) == [0.0] * 3
    for burstiness, deviation in ((0.25, 2.0), (1.0, 1.0), (100.0, 0.1)):
        times = arrivals_s(20_000, 8.0, burstiness, seed=1)
        assert times[-1] == pytest.approx(2500)
        gaps = np.diff([0.0, *times])
        assert gaps.min() >= 0
        assert gaps.std() / gaps.mean() == pytest.approx(deviation, rel=0.05)
    assert arrivals_s(5, 8.0, 1.0, 1) == arrivals_s(5, 8.0, 1.0, 1) != arrivals_s(5, 8.0, 1.0, 2)


TRACE = [
    TraceRequest(1000, 1024, 64, (0, 1)),
    TraceRequest(1500, 1400, 0, (0, 1, 2)),
    TraceRequest(3000, 700, 100, (0, 3)),
    TraceRequest(3000, 512, 6, (4,)),
]


@pytest.fixture
def trace(tmp_path):
    write_mooncake(TRACE, tmp_path / "trace.jsonl")
    return f"--trace={tmp_path / 'trace.jsonl'}"


def test_trace_has_equal_tokens_where_ids_are_equal(trace):
    load = workload_of(options_of(trace, "--token-ids=40:50"))
    first, second, third, fourth = (one.token_ids for one in load.requests)
    assert [len(one.token_ids) for one in load.requests] == [1024, 1400, 700, 512]
    assert first == second[:1024] and first[:512] == third[:512]
    assert first[512:700] != third[512:] and fourth != first[:512]
    assert {token for one in load.requests for token in one.token_ids} == {*range(40, 50)}
    assert [one.output_len for one in load.requests] == [64, 1, 100, 6]
    assert [one.at_s for one in load.requests] == [0, 0.5, 2, 2]
    assert [one.hash_ids for one in load.as_trace()] == [one.hash_ids for one in TRACE]


def test_trace_is_scaled(trace):
    load = workload_of(options_of(trace, "--speed=2", "--scale-lengths=0.03125"))
    assert load.block_size == 16
    assert [len(one.token_ids) for one in load.requests] == [32, 44, 22, 16]
    assert [one.output_len for one in load.requests] == [2, 1, 3, 1]
    assert [one.at_s for one in load.requests] == [0, 0.25, 1, 1]
    first, second, third, _ = (one.token_ids for one in load.requests)
    assert first == second[:32] and first[:16] == third[:16]
    more = workload_of(options_of(trace, "--scale-lengths=0.03125", "--scale-outputs=0.5"))
    assert [one.output_len for one in more.requests] == [32, 1, 50, 3]
    few = workload_of(options_of(trace, "--num-prompts=2", "--request-rate=4"))
    assert len(few.requests) == 2 and few.requests[1].at_s == pytest.approx(0.5)


@pytest.mark.parametrize("scale", [0.0001, 0.003, 0.7, 1.9])
def test_scaled_prompts_fill_their_blocks(trace, scale):
    load = workload_of(options_of(trace, f"--scale-lengths={scale}"))
    for one in load.requests:
        assert -(-len(one.token_ids) // load.block_size) == len(one.block_ids)


def test_trace_without_blocks_shares_nothing(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:00:00.0000000,600,3\n2023-11-16 18:00:01.0000000,600,4\n"
    )
    first, second = workload_of(options_of(f"--trace={path}")).requests
    assert first.token_ids[:16] != second.token_ids[:16] and second.at_s == 1


def test_random_prompts_share_their_beginning():
    given = ["--num-prompts=5", "--random-prefix-len=20", "--random-input-len=30"]
    load = workload_of(options_of(*given, "--random-output-len=9"))
    prompts = [tuple(one.token_ids) for one in load.requests]
    assert {len(prompt) for prompt in prompts} == {50}
    assert len({prompt[:20] for prompt in prompts}) == 1
    assert len({prompt[20:] for prompt in prompts}) == 5
    assert {one.output_len for one in load.requests} == {9}
    assert all(len(one.block_ids) == 3 for one in load.requests)
    assert workload_of(options_of(*given)).requests[0].token_ids == load.requests[0].token_ids
    other = workload_of(options_of(*given, "--seed=1"))
    assert other.requests[0].token_ids != load.requests[0].token_ids


def test_chat_has_a_word_for_each_token():
    body = body_of("/v1/chat/completions", "m", [0, 1, 19], 4, ignore_eos=False)
    assert body["messages"] == [{"role": "user", "content": "cache block cache"}]
    assert "prompt" not in body and "ignore_eos" not in body and body["max_tokens"] == 4


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        ("--goodput=ttft", "argument --goodput: must be a number from 0 on, got ''"),
        ("--goodput=tbt:5", "argument --goodput: must be one of ttft, tpot, e2el with millis"),
        ("--goodput=ttft:nan", "argument --goodput: must be a number from 0 on, got 'nan'"),
        ("--num-prompts=0", "argument --num-prompts: must be an integer from 1 on, got '0'"),
        ("--request-rate=0", "argument --request-rate: must be a number from"),
        ("--burstiness=-1", "argument --burstiness: must be a number from"),
        ("--concurrency=x", "argument --max-concurrency/--concurrency: must be an integer"),
        ("--speed=0", "argument --speed: must be a number from"),
        ("--scale-lengths=inf", "argument --scale-lengths: must be a number from"),
        ("--token-ids=9:9", "argument --token-ids: must be FIRST:END, FIRST below END, got '9:9'"),
        ("--token-ids=-1:9", "argument --token-ids: must be FIRST:END"),
        ("--metric-percentiles=101", "argument --metric-percentiles: must be a number from 0 to"),
        ("--endpoint=/v1/embeddings", "argument --endpoint: invalid choice"),
        ("--rate=3", "unrecognized arguments: --rate=3"),
    ],
)
def test_wrong_option_is_named(argument, error, capsys):
    with pytest.raises(SystemExit) as ended:
        options_of(argument)
    assert ended.value.code == 2
    assert error in capsys.readouterr().err


def test_admission_rules_are_those_of_the_router():
    assert serve_options.RULES == RULES


class Endpoint:
    """An OpenAI server that streams words; what else it does, tests set.

    Attributes:
        bodies: of the requests.
        most: requests under way at once.
        refuse: every so many are refused; 0: none.
        die_at: the request during which it dies; 0: none.
        is_garbage: answer no stream.
        models: what it lists.
    """

    def __init__(self):
        self.bodies: list[dict] = []
        self.most = self._now = 0
        self.refuse = self.die_at = 0
        self.is_garbage, self.models = False, {"data": [{"id": "words"}]}
        self.server = Served(
            Starlette(
                routes=[
                    Route("/v1/models", lambda _: JSONResponse(self.models)),
                    Route("/v1/completions", self._answer, methods=["POST"]),
                    Route("/v1/chat/completions", self._answer, methods=["POST"]),
                ]
            )
        )

    async def _answer(self, request: Request):
        body = await request.json()
        self.bodies.append(body)
        if self.is_garbage:
            return PlainTextResponse("Hello")
        if self.refuse and len(self.bodies) % self.refuse == 0:
            error = {"message": "busy", "code": "overloaded"}
            return JSONResponse({"error": error}, 429, {"retry-after": "7"})
        return StreamingResponse(self._words(body), media_type="text/event-stream")

    async def _words(self, body: dict):
        number = len(self.bodies)
        self._now += 1
        self.most = max(self.most, self._now)
        for index in range(body["max_tokens"]):
            if number == self.die_at and index == 1:
                self.server.stop()  # takes no more
                raise ConnectionResetError("as a test wants it")
            part = {"delta": {"content": "w"}} if "messages" in body else {"text": "w"}
            yield f"data: {json.dumps({'choices': [part]})}\n\n"
            await asyncio.sleep(0.002)
        self._now -= 1
        yield "data: [DONE]\n\n"


@pytest.fixture
def endpoint():
    made = Endpoint()
    yield made
    made.server.close()


def bench(endpoint: Endpoint, *arguments: str) -> int:
    return main(["serve", "bench", "--url", endpoint.server.url, *arguments])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_alone():
    for output, end in (
        (Terminal(), "[" + "#" * 30 + "] 3/3, 1 not answered, 0 s\n"),
        (io.StringIO(), ""),
    ):
        progress = Progress(3, output)
        for error in ("", "x", ""):
            progress.add(Answer(0, 1, error=error))
        assert output.getvalue().endswith(end) and bool(output.getvalue()) is bool(end)


def test_closed_loop_keeps_so_many_under_way(endpoint, capsys):
    load = ["--num-prompts=12", "--max-concurrency=3", "--random-output-len=5"]
    assert bench(endpoint, *load, "--num-warmups=2", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["completed"], told["failed"], told["total_output_tokens"]) == (12, 0, 60)
    assert (told["num_prompts"], told["max_concurrency"]) == (12, 3)
    assert told["request_rate"] == "inf" and told["model_id"] == "words"
    assert endpoint.most == 3 and len(endpoint.bodies) == 14
    assert all(body["ignore_eos"] and body["stream"] for body in endpoint.bodies)


def test_results_are_written(endpoint, tmp_path, capsys):
    endpoint.refuse = 4
    names = {kind: tmp_path / f"run.{kind}" for kind in ("json", "png", "html")}
    files = [f"--output-{kind}={path}" for kind, path in names.items()]
    load = ["--num-prompts=8", "--concurrency=1", "--random-output-len=3"]
    chat = ["--endpoint=/v1/chat/completions", "--model=<m>", "--goodput", "ttft:60000", "tpot:0"]
    assert bench(endpoint, *load, *chat, *files) == 0
    out = capsys.readouterr().out
    assert "Successful requests:                     6\n" in out
    assert "2 not answered: 429 overloaded, again after 7 s\n" in out
    told = json.loads(names["json"].read_text())
    assert told["errors"] == ["", "", "", "429 overloaded"] * 2
    assert told["output_lens"] == [3, 3, 3, 0] * 2 and told["input_lens"] == [64] * 8
    assert [len(gaps) for gaps in told["itls"]] == [2, 2, 2, 0] * 2
    assert told["goodput"] == {"ttft": 60000, "tpot": 0} and told["good"] == 0
    assert told["start_times"] == sorted(told["start_times"])
    assert names["png"].read_bytes().startswith(b"\x89PNG")
    page = names["html"].read_text()
    assert "<svg" in page and "&lt;m&gt; at http" in page and "<td>429 overloaded</td>" in page
    assert "<script" not in page and "<link" not in page


def test_trace_is_replayed(endpoint, trace, capsys):
    assert bench(endpoint, trace, "--scale-lengths=0.03125", "--speed=1000", "--json") == 0
    assert json.loads(capsys.readouterr().out)["completed"] == 4
    sent = sorted(len(body["prompt"]) for body in endpoint.bodies)
    assert sent == [16, 22, 32, 44]


def test_server_that_dies_is_told_and_the_run_ends(endpoint, tmp_path, capsys):
    endpoint.die_at = 3
    path = tmp_path / "run.json"
    assert bench(endpoint, "--num-prompts=20", "--concurrency=1", f"--output-json={path}") == 0
    told = json.loads(path.read_text())
    assert told["errors"][:3] == ["", "", "RemoteProtocolError"]
    assert told["errors"][-1] == "ConnectError"
    assert told["completed"] + told["failed"] == 20 and told["not_answered"]["ConnectError"]
    assert "not answered: ConnectError" in capsys.readouterr().out


def test_garbage_is_told(endpoint, capsys):
    endpoint.is_garbage = True
    assert bench(endpoint, "--num-prompts=2") == 1
    assert f"2 not answered: {GARBAGE}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("models", "error"),
    [
        ({"data": []}, "/v1/models: it has none: no engine is up"),
        ({"data": [3]}, "/v1/models: it lists no models"),
        (["x"], "/v1/models: it lists no models"),
        ({}, "/v1/models: it lists no models"),
    ],
)
def test_server_without_models_is_one_line(endpoint, models, error, capsys):
    endpoint.models = models
    assert bench(endpoint) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: serve: http") and told.endswith(f"{error}\n")


@pytest.mark.parametrize("content", ["", "nonsense\n", '{"timestamp": 0}\n'])
def test_wrong_trace_is_one_line_before_anything_is_sent(endpoint, content, tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    assert bench(endpoint, f"--trace={path}") == 2
    told = capsys.readouterr().err
    assert told.startswith(f"error: {path}, line 1: ") and told.count("\n") == 1
    assert endpoint.bodies == []


def test_simulation_needs_our_router(endpoint, capsys):
    assert bench(endpoint, "--simulate") == 2
    assert "/instances: " in capsys.readouterr().err
    assert endpoint.bodies == []
