"""What the router tells SGLang's engines and reads of them, by SGLang's own classes."""

import asyncio
import json
import socket
from types import SimpleNamespace
from unittest import mock

import httpx
import pytest

pytest.importorskip("sglang", reason="no SGLang: see make_engines")

import sglang_cpu  # noqa: F401  before SGLang
from prometheus_client import REGISTRY, generate_latest
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)
from sglang.srt.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    ErrorResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
)
from sglang.srt.managers.io_struct import (
    GenerateReqInput,
    PdRoleSwitchReqInput,
    PdRoleSwitchReqOutput,
)
from sglang.srt.observability import metrics_collector
from sglang.srt.utils.msgspec_utils import msgspec_to_builtins

from mooncake_serving.conductor import Role
from mooncake_serving.router.call import CHAT, COMPLETIONS, read_call
from mooncake_serving.router.config import InstanceConfig, RouterConfig
from mooncake_serving.router.engines import EngineRefused, Engines, RoleRefused
from mooncake_serving.router.handoff import HANDOFFS, Transfer
from mooncake_serving.router.others import EngineLoad, read_load
from mooncake_serving.store.events import subscribe

PREFILL = InstanceConfig(
    "p", "http://10.0.0.1:8100", Role.PREFILL, bootstrap="http://10.0.0.1:8998"
)
MESSAGES = [{"role": "user", "content": "What is a cache?"}]
BODIES = {
    CHAT: {"model": "m", "messages": MESSAGES, "n": 3, "max_completion_tokens": 5},
    COMPLETIONS: {"model": "m", "prompt": [1, 2, 3], "n": 3, "max_tokens": 5},
}
REQUESTS = {CHAT: ChatCompletionRequest, COMPLETIONS: CompletionRequest}


@pytest.mark.parametrize("path", BODIES)
def test_both_engines_are_told_of_one_room(path):
    body = BODIES[path] | {"stream": True, "stream_options": {"include_usage": True}}
    handoff, transfer = HANDOFFS["sglang"], Transfer("id", PREFILL)
    at_prefill = REQUESTS[path].model_validate(handoff.prefill_body(body, transfer))
    at_decode = REQUESTS[path].model_validate(handoff.decode_body(body, transfer, {}))
    assert at_prefill.pd_routing_kwargs() == at_decode.pd_routing_kwargs() == {
        "bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": transfer.room,
        "routed_dp_rank": None, "disagg_prefill_dp_rank": None,
    }  # fmt: skip
    assert (at_prefill.stream, at_decode.stream) == (False, True)
    assert at_prefill.n == at_decode.n == 3
    request = GenerateReqInput(
        input_ids=[1, 2, 3], sampling_params={"n": 3}, bootstrap_host="10.0.0.1",
        bootstrap_port=8998, bootstrap_room=transfer.room,
    )  # fmt: skip
    request.normalize_batch_and_arguments()
    assert request.bootstrap_room == [transfer.room + sample for sample in range(3)]
    assert max(request.bootstrap_room) < 2**63


@pytest.mark.parametrize("path", BODIES)
def test_prompts_are_tokenized_as_they_are_answered(path):
    body = BODIES[path] | ({"prompt": "a text"} if path == COMPLETIONS else {})
    call = read_call(path, json.dumps(body).encode())
    asked = TokenizeRequest.model_validate(call.tokenize_body())
    if path == COMPLETIONS:
        assert asked.prompt == "a text" and asked.add_special_tokens
    else:
        chat = asked.to_chat_completion_request()
        assert chat.messages == ChatCompletionRequest.model_validate(body).messages


def test_metrics_tell_what_an_engine_does():
    labels = {"model_name": "m", "engine_type": "decode", "tp_rank": 0, "pp_rank": 0}
    labels["moe_ep_rank"] = 1  # whose metrics need nothing else of a server
    count, stats = metrics_collector.QueueCount, metrics_collector.SchedulerStats()
    stats.num_running_reqs, stats.num_queue_reqs = count(total=4), count(total=1)
    stats.num_decode_prealloc_queue_reqs = count(total=2)
    stats.num_decode_transfer_queue_reqs = count(total=3)
    stats.token_usage = 0.25
    settings = SimpleNamespace(
        prefill_delayer_max_delay_passes=1,
        prefill_delayer_forward_passes_buckets=None,
        prefill_delayer_wait_seconds_buckets=None,
    )
    with mock.patch.object(metrics_collector, "get_schedule", return_value=settings):
        collector = metrics_collector.SchedulerMetricsCollector(labels, mock.MagicMock())
    collector.log_stats(stats)
    collector.max_total_num_tokens.labels(**labels).set(65536)
    assert read_load(generate_latest(REGISTRY).decode()) == EngineLoad(4, 6, 0.25, 65536)


def free_endpoint() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{one.getsockname()[1]}"


def test_events_are_received():
    endpoint, replay = free_endpoint(), free_endpoint()
    publisher = ZmqEventPublisher(
        0, endpoint.replace("127.0.0.1", "*"), replay_endpoint=replay, topic="kv"
    )
    stored = BlockStored(
        block_hashes=[-7, 5], parent_block_hash=None, token_ids=[1, 2, 3, 4], block_size=2,
        lora_id=None, medium="GPU", cache_salt="s", session_id="t", lora_name="sql",
    )  # fmt: skip
    removed = BlockRemoved(block_hashes=[5], medium="CPU_PINNED")
    try:
        publisher.publish(KVEventBatch(ts=1.0, events=[stored, removed, AllBlocksCleared()]))
        with subscribe(endpoint, topic="kv", replay_endpoint=replay) as subscription:
            for _ in range(300):  # the first one that arrives has those before it sent again
                publisher.publish(KVEventBatch(ts=2.0, events=[]))
                if (batch := subscription.receive(0.1)) is not None:
                    break
    finally:
        publisher.shutdown()
    assert batch is not None and batch.sequence == 0 and not batch.is_after_gap
    first, second, third = batch.events
    assert (first.block_hashes, first.token_ids, first.block_size) == ([-7, 5], [1, 2, 3, 4], 2)
    assert (first.parent_block_hash, first.lora_name, first.medium) == (None, "sql", "GPU")
    assert (second.block_hashes, second.medium) == ([5], "CPU_PINNED")
    assert type(third).__name__ == "AllBlocksCleared"


def answered_by(answer: httpx.Response, call):
    """What the router makes of an engine's answer."""

    async def ask():
        engines = Engines(RouterConfig(()))
        await engines.close()
        engines._client = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: answer))
        try:
            return await call(engines)
        finally:
            await engines.close()

    return asyncio.run(ask())


def test_adapters_are_asked_for_with_their_model():
    cards = [ModelCard(id="m", root="m"), ModelCard(id="sql", root="/sql", parent="m")]
    answer = httpx.Response(200, json=ModelList(data=cards).model_dump())
    found = answered_by(answer, lambda engines: engines.models(PREFILL))
    assert [card["id"] for card in found] == ["m", "m:sql"]


def test_errors_are_passed_on():
    error = ErrorResponse(message="too long", type="BadRequestError", code=400).model_dump()
    call = read_call(COMPLETIONS, b'{"model": "m", "prompt": "a"}')
    with pytest.raises(EngineRefused) as refused:
        answered_by(
            httpx.Response(400, json=error), lambda engines: engines.ask(PREFILL, call, b"{}")
        )
    assert json.loads(refused.value.body)["message"] == "too long"


def test_roles_are_switched():
    body = {"new_role": "prefill", "decode_cuda_graph_bs": [1]}
    assert PdRoleSwitchReqInput(**body).new_role == "prefill"
    told = PdRoleSwitchReqOutput(success=False, message="not idle", safe_to_restore=True)
    answer = httpx.Response(400, json=msgspec_to_builtins(told))
    with pytest.raises(RoleRefused, match="p: not idle") as refused:
        answered_by(answer, lambda engines: engines.switch_role(PREFILL, "prefill", {}))
    assert refused.value.is_same
    told = PdRoleSwitchReqOutput(success=True, message="switched")
    answer = httpx.Response(200, json=msgspec_to_builtins(told))
    assert answered_by(answer, lambda engines: engines.switch_role(PREFILL, "decode", {})) is None
