"""Our connector inside vLLM: prefill and decode in two engines, compared with one alone."""

from typing import Any

import pytest

from tests.metadata.support import free_port
from tests.serving.in_vllm.support import BLOCK
from tests.serving.in_vllm.support import related_prompts as prompts
from tests.waiting import eventually

PREFILL_ONLY = {"do_remote_decode": True, "do_remote_prefill": False}
TOKEN_BYTES = 3 * 2 * 2 * 64 * 4  # layers, key and value, heads, their size, float32


@pytest.fixture
def start(vllm):
    """Start engines that hand over, and end them after the test."""
    started = []

    def start_one(
        role: str, *, kind: str = "llama", url: str = "", llm: dict | None = None,
        ahead: bool = False, **options: Any,
    ):  # fmt: skip
        port = free_port() if role == "kv_producer" else 0
        settings = {"host": "127.0.0.1", "port": port, "silence_s": 5.0, "slot_bytes": 8 << 20}
        connector = {
            "kv_connector": "StoreConnector",
            "kv_connector_module_path": "mooncake_serving.connectors.vllm",
            "kv_role": role, "engine_id": role, "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {
                "handoff": settings | options, **({"url": url} if url else {}),
            },
        }  # fmt: skip
        given = {**vllm.options_of(kind), "max_num_batched_tokens": 128, **(llm or {})}
        started.append(vllm.engine(connector, options=given, ahead=ahead))
        started[-1].port = port
        return started[-1]

    yield start_one
    for engine in started:
        engine.kill()


def log_of(engine) -> str:
    return engine.log.read_text()


def test_prefill_here_and_decode_there(start):
    prefill, decode = start("kv_producer", lease_s=10.0), start("kv_consumer")
    for engine in (prefill, decode):
        engine.wait()
    num_free = [engine.serve([[7] * 5], 1)["num_free"] for engine in (prefill, decode)]

    # A proxy that has the prompt computed first, and passes on what it is answered.
    requests = prompts(6, 1)
    handed = prefill.serve(requests, 1, [PREFILL_ONLY] * len(requests))
    there = decode.serve(requests, 24, handed["params"])
    assert set(there["reasons"]) == {"length"}
    # The prefill engine alone; its cache has the prompts, and not one token that came after.
    expected = prefill.serve(requests, 24)["tokens"]
    assert there["tokens"] == expected
    assert handed["tokens"] == [tokens[:1] for tokens in expected]
    num_tokens = sum(len(tokens) - 1 for tokens in requests) - sum(there["num_cached"])
    num_bytes = prefill.serve(requests[:1], 1)["written"]["shm"]
    assert num_bytes >= num_tokens * TOKEN_BYTES > 0

    # A proxy that sends a request to both at once: here the decode engine has it long before.
    requests = prompts(6, 2)
    ids = [f"both-{number}" for number in range(len(requests))]
    where = {"remote_host": "127.0.0.1", "remote_port": prefill.port, "do_remote_prefill": True}
    decode.begin(requests, 24, [{**where, "transfer_id": one} for one in ids])
    prefill.serve(requests, 1, [{**PREFILL_ONLY, "transfer_id": one} for one in ids])
    there = decode.answer()
    assert there["tokens"] == prefill.serve(requests, 24)["tokens"]

    # A prompt that is another one is an error, and not another answer.
    [one, other] = prompts(2, 3)
    handed = prefill.serve([one], 1, [PREFILL_ONLY])
    failed = decode.serve([other], 24, handed["params"])
    assert (failed["reasons"], failed["tokens"]) == (["error"], [[]])
    assert "the prompt here" in log_of(decode)

    # An abort while a request is received; then no engine has blocks that no request has.
    decode.begin([one], 8, [{**where, "transfer_id": "aborted"}], aborts=True)
    assert decode.answer()["in_use"] == 0
    # Those of the prompt that was refused stay until the lease ends.
    for engine, count in zip((prefill, decode), num_free, strict=True):
        assert eventually(lambda: engine.serve([[7] * 5], 1)["num_free"] == count)  # noqa: B023

    # The prefill engine dies with one request handed over, and one asked for.
    requests = prompts(2, 4)
    handed = prefill.serve(requests, 1, [PREFILL_ONLY] * 2)
    expected = prefill.serve(requests[:1], 24)["tokens"]
    early = {**where, "transfer_id": "never"}
    decode.begin(requests, 24, [handed["params"][0], early])
    prefill.kill()
    there = decode.answer()
    assert there["reasons"][1] == "error"
    assert there["reasons"][0] == "error" or there["tokens"][0] == expected[0]
    failed = decode.serve(requests[1:], 24, handed["params"][1:])
    assert (failed["reasons"], failed["tokens"]) == (["error"], [[]])
    alone = decode.serve(requests[:1], 24)  # and lives on
    assert (alone["reasons"], alone["tokens"]) == (["length"], expected)
    reached = [line for line in log_of(decode).splitlines() if " reaches " in line]
    assert len(reached) == 1 and "by shm" in reached[0]


@pytest.mark.parametrize("num_senders, num_receivers", [(2, 1), (1, 2)])
def test_other_numbers_of_ranks(start, num_senders, num_receivers):
    prefill = start("kv_producer", llm={"tensor_parallel_size": num_senders})
    decode = start("kv_consumer", llm={"tensor_parallel_size": num_receivers})
    for engine in (prefill, decode):
        engine.wait()
    requests = prompts(4, 1)
    handed = prefill.serve(requests, 1, [PREFILL_ONLY] * len(requests))
    there = decode.serve(requests, 16, handed["params"])
    assert set(there["reasons"]) == {"length"}
    # Sums over ranks are rounded in another way, which does not change these tokens.
    assert there["tokens"] == prefill.serve(requests, 16)["tokens"]
    [one, other] = prompts(2, 3)
    handed = prefill.serve([one], 1, [PREFILL_ONLY])
    failed = decode.serve([other], 16, handed["params"])
    assert (failed["reasons"], failed["tokens"]) == (["error"], [[]])


def test_engines_with_a_store_as_well(start, tmp_path):
    """What a prefill engine has computed outlives it, and another one hands it over."""
    url = f"shm:{tmp_path}/kv?size=64MiB"
    prefill, decode = (start(role, url=url) for role in ("kv_producer", "kv_both"))
    for engine in (prefill, decode):
        engine.wait()
    requests = prompts(4, 1)
    handed = prefill.serve(requests, 1, [PREFILL_ONLY] * len(requests))
    there = decode.serve(requests, 16, handed["params"])
    expected = prefill.serve(requests, 16)["tokens"]
    assert there["tokens"] == expected
    # Of a prompt that has not come nothing is saved, although vLLM counts it as computed.
    [one, other] = prompts(2, 3)
    handed = prefill.serve([one], 1, [PREFILL_ONLY])
    failed = decode.serve([other], 16, handed["params"])
    assert (failed["reasons"], failed["tokens"]) == (["error"], [[]])
    for engine in (prefill, decode):
        engine.serve([[7] * 5], 1)  # saves end with a step
    prefill.kill()

    prefill = start("kv_both", url=url)
    prefill.wait()
    alone = prefill.serve([other], 16)
    pairs = enumerate(zip(one, other, strict=False))
    num_shared = next(i for i, (left, right) in pairs if left != right)
    assert alone["num_cached"] == [num_shared // BLOCK * BLOCK], (
        "what the prefill of `one` has saved"
    )
    [longer] = [[*requests[0], *expected[0]]]
    handed = prefill.serve([longer], 1, [PREFILL_ONLY])
    assert handed["num_cached"][0] >= len(requests[0]) // BLOCK * BLOCK, "loaded from the store"
    there = decode.serve([longer, other], 16, [handed["params"][0], None])
    assert there["tokens"] == [prefill.serve([longer], 16)["tokens"][0], alone["tokens"][0]]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", ["gemma", "lfm2"])
def test_windows_and_states(start, kind, ahead):
    """Of sliding windows and recurrent layers; ahead, vLLM schedules a step while one computes."""
    prefill, decode = (
        start(role, kind=kind, ahead=ahead, lease_s=10.0) for role in ("kv_producer", "kv_consumer")
    )
    for engine in (prefill, decode):
        engine.wait()
    num_free = {one: one.serve([[7] * 5], 1)["num_free"] for one in (prefill, decode)}

    def alone(requests: list) -> list:
        """What an engine answers that computes all itself."""
        assert eventually(lambda: prefill.serve([[7] * 5], 1)["num_free"] == num_free[prefill])
        return prefill.serve(requests, 24, forgets=True)["tokens"]

    requests = [[number, *one] for number, one in enumerate(prompts(6, 1))]
    handed = prefill.serve(requests, 1, [PREFILL_ONLY] * len(requests))
    there = decode.serve(requests, 24, handed["params"])
    assert set(there["reasons"]) == {"length"}
    expected = alone(requests)
    assert there["tokens"] == expected
    assert min(len(set(tokens)) for tokens in expected) > 2, "they depend on what came before"

    # The decode engine first, and the next turn of a conversation.
    turns = [a + b for a, b in zip(requests, expected, strict=True)]
    ids = [f"both-{number}" for number in range(len(turns))]
    where = {"remote_host": "127.0.0.1", "remote_port": prefill.port, "do_remote_prefill": True}
    decode.begin(turns, 24, [{**where, "transfer_id": one} for one in ids])
    prefill.serve(turns, 1, [{**PREFILL_ONLY, "transfer_id": one} for one in ids])
    there = decode.answer()
    assert set(there["reasons"]) == {"length"}
    assert there["tokens"] == alone(turns)
    assert sum(there["num_cached"]) > sum(map(len, requests)) - BLOCK * len(turns)

    # An abort while it is received.
    decode.begin(prompts(1, 9), 8, [{**where, "transfer_id": "aborted"}], aborts=True)
    assert decode.answer()["in_use"] == 0
    # A request of which the prefill engine generates more is refused there, and fails here.
    [one] = prompts(1, 5)
    assert prefill.serve([one], 4, [{**PREFILL_ONLY, "transfer_id": "t"}])["params"] == [None]
    failed = decode.serve([one], 24, [{**where, "transfer_id": "t"}])
    assert (failed["reasons"], failed["tokens"]) == (["error"], [[]])
    assert "max_tokens must be 1" in log_of(decode)
    for engine, count in num_free.items():
        assert eventually(lambda: engine.serve([[7] * 5], 1)["num_free"] == count)  # noqa: B023
