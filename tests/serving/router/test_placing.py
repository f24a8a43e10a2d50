"""Where requests go, by what engines hold and how busy they are; and which are refused."""

import threading

import pytest

from mooncake_serving.store.events import AllBlocksCleared, BlockRemoved, BlockStored
from tests.serving.router.support import (
    ADAPTER,
    APART,
    BLOCK,
    COUPLED,
    MODEL,
    stored,
    tokens_of,
)
from tests.waiting import eventually

SHARED = "You are an assistant that answers in one word, and never explains why. "
SLOW = {"prefill": [0.0, 1.0, 0.0]}  # a second a token: only the queues and the cache count


def prefill_of(answer) -> str:
    parts = dict(part.split("=", 1) for part in answer.headers["x-mooncake-decision"].split("; "))
    return parts["prefill"]


@pytest.mark.parametrize("roles", [COUPLED, APART])
def test_prompts_that_begin_alike_go_to_one_engine(cluster, roles):
    router, _ = cluster(roles)
    first = prefill_of(router.complete(SHARED + "Which colour has the sky?"))
    for question in ("Is water wet?", "Who was Ada?", "What is a bit?"):
        assert prefill_of(router.complete(SHARED + question)) == first
        expected = len(SHARED) // BLOCK * BLOCK
        assert router.last()["prefill"]["cached_tokens"] == expected
    chat = {"model": MODEL, "messages": [{"role": "system", "content": SHARED}], "max_tokens": 2}
    other = prefill_of(router.client.post("/v1/chat/completions", json=chat))
    chat["messages"].append({"role": "user", "content": "Is water wet?"})
    assert prefill_of(router.client.post("/v1/chat/completions", json=chat)) == other
    assert router.last()["prefill"]["cached_tokens"] > 0


def test_what_events_tell_decides(cluster):
    router, engines = cluster(COUPLED, events=True)
    tokens = tokens_of(SHARED)
    for name in ("both-1", "both-0"):
        engines[name].events.send(stored(tokens))
        eventually(lambda name=name: router.instance(name)["held_blocks"] == len(tokens) // BLOCK)
        assert prefill_of(router.complete(SHARED + name)) == name
        engines[name].events.send(AllBlocksCleared())
        eventually(lambda name=name: router.instance(name)["held_blocks"] == 0)
    router.complete(SHARED + "again")
    assert router.last()["prefill"]["cached_tokens"] == 0


def matched(router, tokens, **more) -> dict[str, int]:
    answer = router.client.post("/query", json={"token_ids": tokens, **more}).json()["data"]
    return {name: told["matched_tokens"] for name, told in answer.items()}


def test_a_query_of_mooncakes_conductor_is_answered_in_its_form(cluster):
    router, engines = cluster(COUPLED, events=True)
    tokens = list(range(1, 2 * BLOCK + 1))
    engines["both-1"].events.send(stored(tokens))
    eventually(lambda: router.instance("both-1")["held_blocks"] == 2)
    query = {
        "model": MODEL, "lora_name": "", "token_ids": tokens, "tenant_id": "default",
        "instance_id": "both-1", "block_size": 64, "cache_salt": "",
    }  # fmt: skip
    answer = router.client.post("/query", json=query).json()
    held = {"longest_matched": 2 * BLOCK, "GPU": 2 * BLOCK, "DP": {"0": 2 * BLOCK}}
    assert answer["default"] == {"both-1": held}
    assert matched(router, tokens, cache_salt="a") == {"both-0": 0, "both-1": 0}
    other = router.client.post("/query", json=query | {"tenant_id": "other"})
    assert other.status_code == 400 and other.json()["error"]["param"] == "tenant_id"


def test_blocks_of_other_sizes_and_hashes_are_understood(cluster):
    router, engines = cluster(COUPLED, events=True)
    tokens = list(range(1, 4 * BLOCK + 1))
    first = stored(tokens[: 2 * BLOCK], size=2 * BLOCK)
    second = stored(tokens[2 * BLOCK :], parent=first.block_hashes[-1], size=2 * BLOCK)
    engines["both-0"].events.send(first)
    engines["both-1"].events.send(stored(tokens))
    engines["both-0"].events.send(second)
    eventually(lambda: router.instance("both-0")["held_blocks"] == 2)
    eventually(lambda: router.instance("both-1")["held_blocks"] == 4)
    assert matched(router, tokens) == {"both-0": 4 * BLOCK, "both-1": 4 * BLOCK}
    engines["both-0"].events.send(BlockRemoved(second.block_hashes, "GPU"))
    eventually(lambda: router.instance("both-0")["held_blocks"] == 1)
    assert matched(router, tokens) == {"both-0": 2 * BLOCK, "both-1": 4 * BLOCK}
    assert matched(router, [9, *tokens[1:]]) == {"both-0": 0, "both-1": 0}


def test_blocks_of_an_adapter_are_its_own(cluster):
    router, engines = cluster(COUPLED, events=True)
    tokens = list(range(2 * BLOCK))
    engines["both-0"].events.send(stored(tokens, lora=ADAPTER))
    eventually(lambda: router.instance("both-0")["held_blocks"] == 2)
    assert matched(router, tokens)["both-0"] == 0
    assert matched(router, tokens, lora_name=ADAPTER)["both-0"] == 2 * BLOCK
    answer = router.client.post(
        "/v1/completions", json={"model": ADAPTER, "prompt": [*tokens, 5], "max_tokens": 1}
    )
    assert prefill_of(answer) == "both-0"
    assert router.last()["prefill"]["cached_tokens"] == 2 * BLOCK


def test_events_that_were_lost_are_asked_for_again(cluster):
    router, engines = cluster({"both": "both"}, events=True)
    events, tokens = engines["both"].events, list(range(3 * BLOCK))
    events.send(stored(tokens[:BLOCK]))
    eventually(lambda: router.instance("both")["held_blocks"] == 1)
    middle = stored(tokens[BLOCK : 2 * BLOCK], parent=stored(tokens[:BLOCK]).block_hashes[0])
    events.send(middle, is_lost=True)
    events.send(stored(tokens[2 * BLOCK :], parent=middle.block_hashes[0]))
    eventually(lambda: router.instance("both")["held_blocks"] == 3)
    assert matched(router, tokens) == {"both": 3 * BLOCK}
    assert router.instance("both")["event_gaps"] == 0


def test_events_that_are_lost_for_good_are_learnt_from_later_ones(cluster):
    router, engines = cluster({"both": "both"}, events=True)
    events, tokens = engines["both"].events, list(range(3 * BLOCK))
    first = stored(tokens[: 2 * BLOCK])
    events.send(first)
    eventually(lambda: router.instance("both")["held_blocks"] == 2)
    events.send(BlockRemoved([1], "GPU"), is_lost=True, is_kept=False)
    events.send(stored(list(range(500, 500 + BLOCK))))
    eventually(lambda: router.instance("both")["event_gaps"] == 1)
    eventually(lambda: router.instance("both")["held_blocks"] == 1)
    assert matched(router, tokens) == {"both": 0}  # they may have gone
    events.send(stored(tokens[2 * BLOCK :], parent=first.block_hashes[-1]))
    eventually(lambda: router.instance("both")["held_blocks"] == 4)
    assert matched(router, tokens) == {"both": 3 * BLOCK}  # they have not, as this tells


def test_an_engine_that_restarts_holds_nothing(cluster):
    router, engines = cluster(COUPLED, events=True)
    tokens, events = list(range(2 * BLOCK)), engines["both-0"].events
    for _ in range(3):
        events.send(stored(tokens))
    eventually(lambda: router.instance("both-0")["event_batches"] == 3)
    assert matched(router, tokens)["both-0"] == 2 * BLOCK
    events.restart()
    events.send(stored(list(range(500, 500 + BLOCK))))
    eventually(lambda: router.instance("both-0")["event_gaps"] == 1)
    eventually(lambda: router.instance("both-0")["held_blocks"] == 1)
    assert matched(router, tokens)["both-0"] == 0


def test_blocks_that_cannot_be_named_are_counted(cluster):
    router, engines = cluster({"both": "both"}, events=True)
    tokens = list(range(2 * BLOCK))
    engines["both"].events.send(
        stored(tokens, parent=12345), stored(tokens[:24], size=24), stored(tokens, size=8)
    )
    engines["both"].events.send(BlockStored([1], None, [-1] * BLOCK, BLOCK, None, "GPU"))
    eventually(lambda: router.instance("both")["event_batches"] == 2)
    assert router.instance("both")["unnamed_blocks"] == 2 + 1 + 4 + 1
    assert router.metric("mooncake_router_instance_unnamed_blocks_total") == 8


def test_requests_spread_over_engines_that_hold_nothing(cluster):
    router, engines = cluster(COUPLED, costs=SLOW)
    for engine in engines.values():
        engine.gate.clear()
    asking = [
        threading.Thread(target=router.complete, args=([seed] * 40,), kwargs={"stream": True})
        for seed in range(6)
    ]
    for one in asking:
        one.start()
    eventually(lambda: sum(len(engine.calls) for engine in engines.values()) == 6)
    assert [router.instance(name)["prefills"] for name in COUPLED] == [3, 3]
    for engine in engines.values():
        engine.gate.set()
    for one in asking:
        one.join()
    assert [router.instance(name)["prefills"] for name in COUPLED] == [0, 0]


def test_a_long_queue_costs_more_than_the_prefix(cluster):
    """Nothing is fetched, but the prefix is computed elsewhere: a hot spot spreads."""
    router, engines = cluster(COUPLED, costs=SLOW)
    first = prefill_of(router.complete(SHARED))
    busy = engines[first]
    busy.gate.clear()
    asking = threading.Thread(
        target=router.complete, args=(SHARED + "x" * 300,), kwargs={"stream": True}
    )
    asking.start()
    eventually(lambda: len(busy.calls) == 2)
    assert prefill_of(router.complete(SHARED + "why?")) != first
    busy.gate.set()
    asking.join()


@pytest.mark.parametrize("rule", ["early", "predictive", "baseline"])
def test_overload_is_refused_with_the_reason(cluster, rule):
    admission = {"ttft_s": 100, "tbt_s": 1000, "rule": rule}
    router, engines = cluster(APART, costs=SLOW, admission=admission)
    for name, engine in engines.items():
        if name.startswith("prefill"):
            engine.gate.clear()
    asking = [threading.Thread(target=router.complete, args=([i] * 80,)) for i in range(2)]
    for one in asking:
        one.start()
    eventually(lambda: sum(len(engine.calls) for engine in engines.values()) == 2)
    answer = router.complete([7] * 60)
    assert answer.status_code == 429
    error = answer.json()["error"]
    assert error["type"] == "rate_limit_error" and error["code"] == "overloaded"
    assert "of its objective" in error["message"]
    assert 20 <= int(answer.headers["retry-after"]) <= 40  # 80 + 60 seconds, of which 100 are left
    assert "why=PREFILL_LOAD" in answer.headers["x-mooncake-decision"]
    assert router.last()["outcome"] == "refused"
    assert router.metric("mooncake_router_refusals_total") == 1
    for engine in engines.values():
        engine.gate.set()
    for one in asking:
        one.join()
    assert router.complete([7] * 60).status_code == 200


CLASSES = {"interactive": {"ttft_s": 50}, "batch": {"ttft_s": 1000, "tbt_s": 0.15}}


def of_class(router, name: str, prompt: list[int]):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
    headers = {"x-mooncake-class": name} if name else {}
    return router.client.post("/v1/completions", json=body, headers=headers)


def test_classes_have_objectives_of_their_own(cluster):
    admission = {"ttft_s": 100, "classes": CLASSES}
    router, _ = cluster({"both": "both"}, costs=SLOW, admission=admission)
    for seed, (name, length, status) in enumerate(
        [("", 60, 200), ("", 120, 429), ("interactive", 60, 429), ("batch", 120, 200)]
    ):
        answer = of_class(router, name, [seed] * length)
        assert answer.status_code == status
        part = f"; class={name}; "
        assert (part in answer.headers["x-mooncake-decision"]) is bool(name)
        assert router.last()["class"] == name
    refused = of_class(router, "interactive", [9] * 60).json()["error"]["message"]
    assert refused.startswith("overloaded for class interactive: TTFT 60.000 s is 1.20 of its")
    labels = 'mooncake_router_refusals_total{class="interactive",why="PREFILL_LOAD"} 2.0'
    assert labels in router.client.get("/metrics").text


def test_a_class_is_checked_again_after_its_prefill(cluster):
    admission = {"rule": "baseline", "classes": CLASSES}
    costs = {"decode": [0.0, 0.1, 0.0]}  # of which one request of the class has room
    roles = {"prefill": "prefill", "decode": "decode"}
    router, engines = cluster(roles, admission=admission, costs=costs)
    engines["decode"].gate.clear()
    asking = threading.Thread(target=of_class, args=(router, "batch", [1]))
    asking.start()
    eventually(lambda: engines["decode"].calls)
    answer = of_class(router, "batch", [2])
    assert answer.status_code == 429
    assert "overloaded for class batch: TBT" in answer.json()["error"]["message"]
    engines["decode"].gate.set()
    asking.join()


@pytest.mark.parametrize("classes", [CLASSES, {}])
def test_a_class_must_be_known(cluster, classes):
    router, engines = cluster({"both": "both"}, admission={"classes": classes})
    answer = of_class(router, "best", [1])
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "the header x-mooncake-class" and "got 'best'" in error["message"]
    assert ("one of interactive, batch" in error["message"]) is bool(classes)
    assert not engines["both"].calls


def test_low_priorities_are_refused_first(cluster):
    admission = {"ttft_s": 100, "limits": {"1": 0.5}}
    router, _ = cluster({"both": "both"}, costs=SLOW, admission=admission)
    assert router.complete([7] * 60, priority=1).status_code == 429
    assert router.complete([7] * 60, priority=0).status_code == 200


def test_a_request_is_refused_after_its_prefill_if_decode_is_full_then(cluster):
    roles = {"prefill": "prefill", "decode": "decode"}
    admission = {"ttft_s": 1000, "tbt_s": 0.15, "rule": "baseline"}
    costs = {"decode": [0.0, 0.1, 0.0]}  # of which one request has room
    router, engines = cluster(roles, admission=admission, costs=costs)
    engines["decode"].gate.clear()
    asking = threading.Thread(target=router.complete, args=("abc",))
    asking.start()
    eventually(lambda: engines["decode"].calls)
    answer = router.complete("abd")
    assert answer.status_code == 429 and "TBT" in answer.json()["error"]["message"]
    assert len(engines["prefill"].calls) == 2 and len(engines["decode"].calls) == 1
    assert "refused after its prefill" in router.last()["outcome"]
    decision = answer.headers["x-mooncake-decision"]
    assert "why=DECODE_LOAD; prefilled_s=" in decision and "prefill=prefill" in decision
    engines["decode"].gate.set()
    asking.join()
    assert router.complete("abd").status_code == 200


def test_a_prompt_that_no_engine_holds_is_refused(cluster):
    router, engines = cluster({"both": "both"})  # of 16,000 tokens, as its metrics say
    answer = router.complete("abc", max_tokens=16_000)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert not engines["both"].calls


def test_costs_follow_what_is_measured(cluster):
    router, _ = cluster({"p": "prefill", "d": "decode"}, engine={"prefill_s": 0.02})
    assert router.get("/instances")["costs"]["prefill"]["source"] == "assumed"
    for length in range(1, 12):
        router.complete([length] * length * 40, max_tokens=40, stream=True)
    costs = eventually(
        lambda: (c := router.get("/instances")["costs"])["prefill"]["source"] == "fitted" and c
    )
    assert costs["prefill"]["num_samples"] >= 8
    assert costs["prefill"]["base_s"] + 40 * costs["prefill"]["per_token_s"] > 0.01
    assert costs["decode"]["num_samples"] >= 8


def test_a_store_of_all_engines_has_prefixes_fetched(cluster):
    store = {"kv_bytes_per_token": 1, "bytes_per_s": 1e9}
    router, engines = cluster(COUPLED, costs=SLOW, store=store)
    first = prefill_of(router.complete(SHARED))
    engines[first].gate.clear()
    asking = threading.Thread(
        target=router.complete, args=(SHARED + "x" * 300,), kwargs={"stream": True}
    )
    asking.start()
    eventually(lambda: len(engines[first].calls) == 2)
    assert prefill_of(router.complete(SHARED + "why?")) != first
    assert router.last()["prefill"]["cached_tokens"] == len(SHARED) // BLOCK * BLOCK
    assert "it fetches" in router.last()["prefill"]["reason"]
    engines[first].gate.set()
    asking.join()
