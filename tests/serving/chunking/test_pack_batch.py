"""Steps: decodes first, within the budget, in order, and no waiting request is overtaken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_kernels import ChunkBatch, InvalidArgument
from mooncake_serving.chunking import PendingRequest, pack_batch


def decode(name: object, context: int = 10, drafts: int = 0) -> PendingRequest:
    return PendingRequest(name, context, 1 + drafts)


def prompt(name: object, num_tokens: int, done: int = 0) -> PendingRequest:
    return PendingRequest(name, done, num_tokens - done)


def taken(batch: ChunkBatch) -> list[tuple[object, int]]:
    return [(request.request_id, num_tokens) for request, num_tokens in batch.chunks]


def test_batch_matches_sarathi() -> None:
    """Decodes, the prompt under way, then as much of a new one as is left."""
    decodes, under_way = [decode("a", 100), decode("b", 7)], [prompt("c", 300, done=60)]
    batch = pack_batch(decodes, under_way, 256, waiting=[prompt("d", 90)])
    assert taken(batch) == [("a", 1), ("b", 1), ("c", 240), ("d", 14)]
    assert isinstance(batch, ChunkBatch)
    assert batch.q_lens.tolist() == [1, 1, 240, 14]
    assert batch.kv_lens.tolist() == [101, 8, 300, 14]
    assert batch.query_positions()[[0, 1, 2, 241]].tolist() == [100, 7, 60, 299]
    of_row = [batch.requests[index].request_id for index in batch.request_of().tolist()]
    assert "".join(of_row) == "ab" + "c" * 240 + "d" * 14


def test_chunk_size_is_limited() -> None:
    batch = pack_batch([], [prompt("a", 50), prompt("b", 50)], 60, max_chunk=16)
    assert taken(batch) == [("a", 16), ("b", 16)]


def test_a_step_has_at_most_that_many_requests() -> None:
    batch = pack_batch([decode(0)], [prompt(1, 3), prompt(2, 3)], 60, max_requests=2)
    assert taken(batch) == [(0, 1), (1, 3)]


def test_prompt_does_not_overtake_a_waiting_decode() -> None:
    batch = pack_batch([decode(0), decode(1, drafts=4), decode(2)], [prompt(3, 9)], 5)
    assert taken(batch) == [(0, 1)]


def test_all_candidates_are_checked_before_any_is_admitted() -> None:
    asked: list[object] = []

    def admit(request: PendingRequest) -> bool:
        asked.append(request.request_id)
        return True

    waiting = [prompt("a", 5), prompt("b", 0), prompt("c", 5)]
    with pytest.raises(InvalidArgument, match="requests must have pending tokens"):
        pack_batch([], [], 10, waiting=waiting, admit=admit)
    assert asked == []
    assert taken(pack_batch([], [], 10, waiting=waiting, admit=admit, max_requests=1)) == [("a", 5)]
    assert asked == ["a"]


def test_request_that_is_not_admitted_blocks_those_behind_it() -> None:
    asked: list[object] = []

    def admit(request: PendingRequest) -> bool:
        asked.append(request.request_id)
        return request.num_pending < 50

    waiting = [prompt("a", 10), prompt("b", 50), prompt("c", 10)]
    assert taken(pack_batch([], [], 100, waiting=waiting, admit=admit)) == [("a", 10)]
    assert asked == ["a", "b"]


def test_no_request_is_admitted_without_tokens() -> None:
    def admit(request: PendingRequest) -> bool:
        raise AssertionError(request)

    assert taken(pack_batch([decode(0)], [prompt(1, 7)], 8, waiting=[prompt(2, 1)], admit=admit))
    full = pack_batch([decode(0)], [], 8, waiting=[prompt(2, 1)], admit=admit, max_requests=1)
    assert taken(full) == [(0, 1)]


def test_empty_step() -> None:
    batch = pack_batch([], [], 8)
    assert (batch.num_requests, batch.num_q, batch.requests) == (0, 0, [])


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (([], [], 0), {}, "budget must be an integer of at least 1, got 0"),
        (([], [], 8), {"max_chunk": 0}, "max_chunk must be an integer of at least 1, got 0"),
        (([], [], 8), {"max_requests": 0}, "max_requests must be an integer of at least 1, got 0"),
        (([], [], True), {}, "budget must be an integer of at least 1, got True"),
        (([], [], float("nan")), {}, "budget must be an integer of at least 1, got nan"),
        (([], [], 8), {"max_chunk": 2.5}, "max_chunk must be an integer of at least 1, got 2.5"),
        (([decode("x", drafts=8)], [], 8), {}, "budget must hold the 9 pending tokens .*'x'"),
        (([PendingRequest(1, 5, "1")], [], 8), {}, "must have pending tokens, got .* with '1'"),
        (([], [PendingRequest(1, 5, 1.0)], 8), {}, "must have pending tokens, got .* with 1.0"),
        (([], [], -(10**5000)), {}, "budget must be an integer of at least 1, got a huge int"),
        ((None, [], 8), {}, "decodes must be requests, got None"),
        (([], 5, 8), {}, "prefills must be requests, got 5"),
        (([], [], 8), {"waiting": None}, "waiting must be requests, got None"),
        (([7], [], 8), {}, "requests must have num_computed, got 7"),
        (
            ([PendingRequest(1, -1, 1)], [], 8),
            {},
            "num_computed must be at least 0, got .* with -1",
        ),
        (([], [PendingRequest(1, "0", 1)], 8), {}, "num_computed must be .* with '0'"),
        (([], [prompt("y", 5, done=5)], 8), {}, "must have pending tokens, got .*'y'.* with 0"),
    ],
)
def test_bad_arguments_are_rejected(arguments: tuple, options: dict, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        pack_batch(*arguments, **options)


lengths = st.lists(st.integers(1, 40), max_size=6)


@given(
    st.integers(0, 6), lengths, lengths, st.integers(1, 60), st.integers(1, 60), st.integers(1, 9)
)
def test_batch_invariants_hold_for_any_step(
    num_decodes: int,
    prefills: list[int],
    waiting: list[int],
    budget: int,
    max_chunk: int,
    max_requests: int,
) -> None:
    every = [
        *(decode(("decode", i)) for i in range(num_decodes)),
        *(prompt(("prefill", i), n) for i, n in enumerate(prefills)),
        *(prompt(("waiting", i), n) for i, n in enumerate(waiting)),
    ]
    split = num_decodes, num_decodes + len(prefills)
    batch = pack_batch(
        every[: split[0]],
        every[split[0] : split[1]],
        budget,
        waiting=every[split[1] :],
        max_chunk=max_chunk,
        max_requests=max_requests,
    )
    used = batch.num_q
    assert used <= budget and batch.num_requests <= max_requests
    assert batch.requests == every[: batch.num_requests], "in order, and none is left out"
    for request, num_tokens in batch.chunks[:-1]:
        assert num_tokens == min(request.num_pending, max_chunk)
    decodes_taken = min(num_decodes, batch.num_requests)
    if decodes_taken < num_decodes:
        assert batch.num_requests == min(budget, max_requests), "decodes alone filled the step"
    if batch.num_requests < min(len(every), max_requests):
        assert used == budget, "tokens are left only if no request is"


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(8, 40), st.data())
def test_every_request_finishes(prompts: list[int], budget: int, data: st.DataObject) -> None:
    """Step after step; as many decodes as fit are running, each gets a token in each step."""
    todo = {i: [0, n] for i, n in enumerate(prompts)}  # computed, of the prompt
    decodes_left = {i: data.draw(st.integers(0, 5)) for i in todo}
    for _ in range(sum(prompts) + sum(decodes_left.values()) + 1):
        decodes = [decode(i, todo[i][0]) for i in todo if todo[i][0] >= todo[i][1]]
        prefills = [prompt(i, todo[i][1], todo[i][0]) for i in todo if todo[i][0] < todo[i][1]]
        if not todo:
            return
        batch = pack_batch(decodes, prefills, budget)
        assert batch.requests[: len(decodes)] == decodes
        for request, num_tokens in batch.chunks:
            name = request.request_id
            todo[name][0] += num_tokens
            if todo[name][0] >= todo[name][1] + decodes_left[name]:
                del todo[name]
    raise AssertionError("a request has not ended")
