"""Queues of prefills, some of which are given up: against queues that never had them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_serving.conductor import Cluster, Fetch, PrefillChoice, Reason, Role, Why
from mooncake_serving.conductor.prefill_queues import PrefillQueues

CHOICE = PrefillChoice(0, 0, 0, None, 0.0, 1.0, 1.0, 1.0, Reason(Why.LEAST_TBT))


@given(st.lists(st.tuples(*[st.sampled_from([0.0, 0.5, 1.0, 2.0])] * 4), max_size=6), st.data())
def test_cancelled_prefills_leave_no_trace_in_the_queue(times, data):
    """Each prefill: seconds since the one before, of its fetch, in the first and later stages."""
    given_up = data.draw(st.sets(st.sampled_from(range(len(times))))) if times else set()
    order = data.draw(st.permutations(sorted(given_up)))

    def queue(numbers):
        cluster, now_s = Cluster([Role.PREFILL]), 5.0
        queues = PrefillQueues(cluster)
        for number, (since_s, fetch_s, occupied_s, rest_s) in enumerate(times):
            now_s += since_s
            fetch = Fetch(0, 0, 0, 1, 512, fetch_s) if fetch_s else None
            prefill = replace(CHOICE, fetch=fetch, occupied_s=occupied_s)
            prefill = replace(prefill, prefill_s=occupied_s + rest_s)
            if number in numbers:
                queues.put(number, prefill, now_s)
        return cluster, queues

    cluster, queues = queue(range(len(times)))
    for number in order:
        queues.give_up(number, 0)
    expected, _ = queue(set(range(len(times))) - given_up)
    assert cluster.free_at_s[0] == pytest.approx(expected.free_at_s[0])
    assert cluster.drain_s[0] == pytest.approx(expected.drain_s[0])
