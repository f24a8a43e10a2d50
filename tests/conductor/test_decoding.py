"""Where a request is decoded, and what is forecast for it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_serving.conductor import (
    Cluster,
    DecodeLoad,
    InFlight,
    LinearDecode,
    Reason,
    Role,
    Why,
    choose_decode,
)

from .support import COSTS, request


def cluster(n=3, **options) -> Cluster:
    return Cluster([Role.DECODE] * n, **options)


def choose(state, cost=COSTS.decode, **options):
    candidates = np.arange(state.num_instances)
    asked = request(num_blocks=1, num_output_tokens=50)
    return choose_decode(asked, state, cost, candidates, DecodeLoad.now(state), **options)


def test_shortest_step_is_chosen():
    state = cluster()
    state.batch_size[:] = 5, 3, 4
    choice = choose(state)
    assert choice.instance == 1 and choice.batch_size == 4
    assert choice.tbt_s == pytest.approx(0.014) and choice.kv_tokens == 100


def test_reservations_count_in_the_choice_but_not_in_current_tbt():
    state = cluster()
    state.batch_size[:] = 5, 3, 4
    state.reserved_requests[:] = 0, 9, 0
    choice = choose(state)
    assert choice.instance == 2 and choice.tbt_s == pytest.approx(0.015)
    state.reserved_requests[2] = 1
    choice = choose(state)
    assert choice.instance == 0, "6 and 6: the first"
    assert choice.reserved_tbt_s == pytest.approx(0.016)


def test_long_contexts_make_long_steps():
    state = cluster(2)
    state.batch_size[:], state.kv_tokens[:] = (9, 1), (1000, 900_000)
    assert choose(state, LinearDecode(0.01, 1e-4, 1e-8)).instance == 0


def test_room_is_required_for_prompt_and_expected_output():
    state = cluster(2, capacity_tokens=[1000, 1000])
    state.kv_tokens[:], state.reserved_tokens[:] = (700, 851), (150, 0)
    assert choose(state).instance == 0, "700 + 150 + 100 + 50 is just 1000"
    state.reserved_tokens[0] += 1
    refusal = choose(state)
    assert isinstance(refusal, Reason) and refusal.why is Why.NO_DECODE_ROOM
    assert str(refusal) == "no instance that decodes has room for 150 tokens"
    assert choose(state, needs_room=False).instance == 0


def test_batch_size_is_limited():
    state = cluster(2, max_batch_size=4)
    state.batch_size[:], state.reserved_requests[:] = (2, 3), (2, 0)
    assert choose(state).instance == 1
    state.batch_size[1] = 4
    assert choose(state).why is Why.NO_DECODE_ROOM


flights = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 3), st.integers(0, 30), st.booleans()),
    max_size=120,
)


@given(flights, st.integers(0, 40), st.integers(1, 20))
@settings(max_examples=100, deadline=None)
def test_forecast_matches_the_loop(steps, at_s, decode_s):
    flying, known = InFlight(), {}
    for request_id, instance, begin_s, leaves in steps:
        if leaves:
            flying.remove(request_id)
            known.pop(request_id, None)
        else:
            asked = request(request_id, num_blocks=1 + request_id, num_output_tokens=request_id)
            flying.put(asked, instance, begin_s)
            known[request_id] = (asked, instance, begin_s)
    assert len(flying) == len(known)
    load = flying.load_at(at_s, decode_s, 4)
    there = [(r, i) for r, i, begin_s in known.values() if begin_s <= at_s < begin_s + decode_s]
    for i in range(4):
        mine = [r for r, instance in there if instance == i]
        assert load.batch_size[i] == len(mine)
        assert load.kv_tokens[i] == sum(r.num_tokens for r in mine)
        assert load.reserved_tokens[i] == sum(r.num_output_tokens for r in mine)
        assert load.reserved_requests[i] == 0


def test_forecast_with_many_requests_in_flight():
    flying = InFlight()
    for number in range(1000):
        flying.put(request(number), number % 4, float(number))
    for number in range(0, 1000, 2):
        flying.remove(number)
    assert flying.load_at(500, 100, 4).batch_size.tolist() == [0, 25, 0, 25]
