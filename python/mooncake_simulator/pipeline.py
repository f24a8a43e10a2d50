"""A pipeline of stages that serves micro-batches in turn: the source of SARATHI's bubbles."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .step_cost import StepCost
from .traces import TraceRequest


@dataclass(slots=True)
class _Member:
    request: TraceRequest
    done: int = 0  # tokens of the prompt
    generated: int = 0
    bubble_s: float = 0.0


@dataclass(slots=True)
class _MicroBatch:
    members: list[_Member] = field(default_factory=list)
    ready_s: float = 0.0  # its last step has left the pipeline


@dataclass(frozen=True)
class PipelineResult:
    """When the last request was served, and the idle time of stages that each request saw."""

    makespan_s: float
    bubbles_s: Sequence[float]


def serve_by_pipeline(
    cost: StepCost,
    requests: Sequence[TraceRequest],
    *,
    num_stages: int,
    batch_size: int,
    token_budget: int | None,
) -> PipelineResult:
    """Serve requests that are all there, with as many micro-batches as there are stages.

    for micro-batches in turn: admit up to ``batch_size``; a step of all decodes and either whole
    prompts (``token_budget`` None: Orca) or their tokens up to a budget (SARATHI); it passes the
    stages, each of which takes 1 / num_stages of the step; any wait of a stage is a bubble

    A request's bubble is the sum of all stages' over its steps. Source: SARATHI
    (arXiv:2308.16369), sections 3.3 and 5.3.
    """
    waiting = deque(_Member(request) for request in requests)
    batches = [_MicroBatch() for _ in range(num_stages)]
    free_s = [0.0] * num_stages
    bubbles = []
    turn = 0
    while waiting or any(batch.members for batch in batches):
        batch = batches[turn % num_stages]
        turn += 1
        while waiting and len(batch.members) < batch_size:
            batch.members.append(waiting.popleft())
        if not batch.members:
            continue
        stage_s = _step_s(cost, batch.members, token_budget) / num_stages
        time, bubble = batch.ready_s, 0.0
        for stage in range(num_stages):
            start = max(time, free_s[stage])
            bubble += start - free_s[stage]
            time = free_s[stage] = start + stage_s
        batch.ready_s = time
        for member in batch.members:
            member.bubble_s += bubble
        bubbles += [member.bubble_s for member in batch.members if _is_over(member)]
        batch.members = [member for member in batch.members if not _is_over(member)]
    return PipelineResult(max(free_s), bubbles)


def _is_over(member: _Member) -> bool:
    return member.generated >= member.request.output_length


def _step_s(cost: StepCost, members: list[_Member], token_budget: int | None) -> float:
    """Choose the members' work in this step, carry it out, and return how long it takes."""
    decodes = [m for m in members if m.done >= m.request.input_length]
    kv_tokens = sum(m.done + m.generated for m in decodes)
    room = float("inf") if token_budget is None else max(1, token_budget - len(decodes))
    chunks = []
    for member in members:
        tokens = int(min(member.request.input_length - member.done, room))
        if tokens > 0:
            chunks.append((tokens, member.done))
            member.done += tokens
            room -= tokens
            member.generated += member.done >= member.request.input_length
    for member in decodes:
        member.generated += 1
    return cost.mixed_s(chunks, len(decodes), kv_tokens)
