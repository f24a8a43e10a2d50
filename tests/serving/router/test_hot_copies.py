"""Hot prefixes, which further engines load before requests need them there."""

import threading

import pytest

from tests.serving.router.support import APART, BLOCK, COUPLED, MODEL, tokens_of
from tests.waiting import eventually

SHARED = "You are an assistant that answers in one word, and never explains why. "
NUM_SHARED = len(SHARED) // BLOCK
# Some requests within a second are a rate of some 0.01 of them, at a half-life of a minute.
OFTEN = {"rate_per_holder": 0.02, "max_per_s": 1000.0}
STORE = {"kv_bytes_per_token": 1000.0, "bytes_per_s": 1e9}
SLOW = {"prefill": [0.0, 1.0, 0.0]}  # a second a token: requests go where their prefix is


def with_copies(**more) -> dict:
    return {"store": STORE | {"copies": OFTEN | more}, "costs": SLOW}


def ask_often(router, prefix: str = SHARED, count: int = 6) -> None:
    for number in range(count):
        assert router.complete(f"{prefix}{number}").status_code == 200


def copies(router) -> list[dict]:
    return router.get("/decisions")["copies"]


def made(router) -> dict:
    """The first copy that is made."""
    eventually(lambda: any("outcome" in copy for copy in copies(router)))
    return copies(router)[-1]


def held(router, text: str) -> dict[str, int]:
    query = {"token_ids": tokens_of(text)}
    told = router.client.post("/query", json=query).json()["data"]
    return {name: tokens["matched_tokens"] for name, tokens in told.items()}


def of_copies(engine) -> list[tuple[dict, dict]]:
    """Bodies and headers of the requests that load a prefix."""
    prompt = tokens_of(SHARED)[: NUM_SHARED * BLOCK + 1]
    return [(body, headers) for _, body, headers in engine.calls if body["prompt"] == prompt]


@pytest.mark.parametrize("roles", [COUPLED, APART])
def test_a_hot_prefix_is_loaded_by_another_engine_that_prefills(cluster, roles, tmp_path):
    (tmp_path / "key").write_text("of-engines")
    more = with_copies() | {"engine_api_key_file": str(tmp_path / "key")}
    router, engines = cluster(roles, **more)
    ask_often(router)
    copy = made(router)
    assert (copy["outcome"], copy["tokens"]) == ("made", NUM_SHARED * BLOCK)
    assert {copy["holder"], copy["instance"]} == {
        n for n, role in roles.items() if role != "decode"
    }
    assert "times a second" in copy["reason"]
    [(body, headers)] = of_copies(engines[copy["instance"]])
    assert (body["model"], body["max_tokens"]) == (MODEL, 1)
    assert headers["authorization"] == "Bearer of-engines"
    assert held(router, SHARED)[copy["instance"]] == NUM_SHARED * BLOCK
    assert router.metric("mooncake_router_copies_total") == 1
    assert router.metric("mooncake_router_copied_tokens_total") == NUM_SHARED * BLOCK
    assert router.metric("mooncake_router_requests_total") == 6


def test_nothing_is_copied_unless_the_file_says_so(cluster):
    router, _ = cluster(COUPLED, store=STORE)
    ask_often(router)
    assert router.router.copies is None and "copies" not in router.get("/decisions")


def test_a_prefix_has_no_more_holders_than_allowed(cluster):
    router, engines = cluster(COUPLED | {"both-2": "both"}, **with_copies(max_holders=2))
    ask_often(router)
    made(router)
    ask_often(router, SHARED, 12)
    ask_often(router, SHARED.swapcase())  # whose copy comes after all of those
    eventually(lambda: len(copies(router)) == 2)
    assert sum(len(of_copies(engine)) for engine in engines.values()) == 1


def test_so_many_copies_are_made_in_a_time(cluster):
    router, _ = cluster(COUPLED, **with_copies(max_per_s=0.001))
    ask_often(router)
    made(router)
    ask_often(router, SHARED.swapcase())
    heat = router.router.copies._heat
    eventually(lambda: len(heat) >= 2 * NUM_SHARED)  # it was looked at
    assert len(copies(router)) == 1


def test_an_engine_that_has_prompts_to_compute_is_left_alone(cluster):
    router, engines = cluster(COUPLED, **with_copies())
    for engine in engines.values():
        engine.gate.clear()
    busy = threading.Thread(target=router.complete, args=("x" * 200,))
    busy.start()
    try:
        eventually(lambda: any(engine.calls for engine in engines.values()))
        other, holder = sorted(engines, key=lambda name: not engines[name].calls)
        engines[holder].gate.set()
        ask_often(router)
        eventually(lambda: len(router.router.copies._heat) >= NUM_SHARED)
        assert not copies(router)
    finally:
        engines[other].gate.set()
        busy.join()
    ask_often(router)
    copy = made(router)
    assert (copy["holder"], copy["instance"]) == (holder, other)


def test_a_copy_that_fails_is_told_once_and_concerns_no_request(cluster, caplog):
    router, engines = cluster(COUPLED, **with_copies())
    router.complete(SHARED)
    holder = router.last()["prefill"]["instance"]
    other = next(name for name in COUPLED if name != holder)
    engines[other].fail_with = 500
    ask_often(router)
    copy = made(router)
    assert copy["instance"] == other and copy["outcome"].startswith("failed: ")
    assert held(router, SHARED)[other] == 0
    router.router.copies._paused[other] = 0.0  # as if the pause were over
    ask_often(router)
    eventually(lambda: sum("outcome" in one for one in copies(router)) == 2)
    assert sum("does not load a hot prefix" in line for line in caplog.messages) == 1
    assert router.metric("mooncake_router_copies_total") == 2
    assert router.metric("mooncake_router_failed_attempts_total") == 0
    assert router.instance(other)["up"]


def test_prefill_engines_of_sglang_are_left_alone(cluster):
    router, engines = cluster(APART, connector="sglang", **with_copies())
    ask_often(router)
    eventually(lambda: len(router.router.copies._heat) >= NUM_SHARED)
    assert not copies(router)
    assert not any(of_copies(engine) for engine in engines.values())
