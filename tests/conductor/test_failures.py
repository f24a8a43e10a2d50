"""Instances that go down: what is lost with them, and what is not."""

import pytest

from mooncake_serving.conductor import InvalidArgument

from .support import make, request, state


def test_failure_loses_only_the_state_of_that_instance():
    conductor = make(2, 2)
    for number in range(4):
        conductor.commit(conductor.decide(request(number, first_key=100 * number), 0.0))
    reserved = conductor.reservations.open.values()
    assert [(d.prefill.instance, d.decode.instance) for d in reserved] == [
        (0, 2),
        (1, 3),
        (0, 2),
        (1, 3),
    ]
    conductor.prefilled(0, 1.0)
    assert conductor.failed(0) == [2], "request 0 is decoded elsewhere already"
    assert conductor.index.match(request(2, first_key=200).keys).tolist() == [0] * 4
    assert conductor.failed(2) == [0]
    assert conductor.decide(request(9), 1.0).prefill.instance == 1
    for number in (1, 3):
        conductor.decoded(number)
    assert not any(any(values) for values in state(conductor).values())
    conductor.recovered(0)
    assert conductor.decide(request(9), 1.0).prefill.instance == 0


def test_failed_decode_instance_drops_its_queued_requests():
    conductor = make(1, 2)
    for number in range(4):
        conductor.commit(conductor.decide(request(number, first_key=100 * number), 0.0))
    assert conductor.cluster.free_at_s[0] == pytest.approx(4.0)
    conductor.prefilled(0, 1.0)
    assert conductor.failed(1) == [0, 2], "request 0 is prefilled"
    assert conductor.cluster.free_at_s[0] == pytest.approx(3.0)


def test_a_failed_source_sends_to_no_one():
    conductor = make(2)
    conductor.index.add(1, request().keys[:8])
    conductor.cluster.free_at_s[1] = 9.0
    conductor.commit(conductor.decide(request(), 0.0))
    assert conductor.cluster.num_sending[1] == 1
    assert conductor.failed(1) == [], "request 0 goes on without the prefix"
    conductor.recovered(1)
    assert conductor.prefilled(0, 1.0).accepted
    assert conductor.cluster.num_sending[1] == 0


@pytest.mark.parametrize("failed", range(4))
def test_owner_counters_return_to_zero_after_a_failure(failed):
    conductor = make(2, 2)
    conductor.index.add(1, request().keys[:8])
    conductor.cluster.free_at_s[1] = 9.0
    conductor.commit(conductor.decide(request(0), 0.0))
    conductor.commit(conductor.decide(request(1, first_key=100), 0.0))
    conductor.prefilled(1, 1.0)
    assert conductor.cluster.num_sending[1] == 1 and conductor.cluster.batch_size.sum() == 1
    counters = [getattr(conductor.cluster, name) for name in state(conductor)]
    for counter in counters:
        counter[failed] += 3
    conductor.failed(failed)
    conductor.recovered(failed)
    for request_id in list(conductor.reservations.open):
        conductor.decoded(request_id)
    for counter in counters:
        counter[failed] -= 3
    assert not any(any(values) for values in state(conductor).values())


@pytest.mark.parametrize("role, instance", [("prefill", 0), ("fetch.source", 1), ("decode", 2)])
def test_a_decision_for_an_instance_that_has_failed_since_is_not_committed(role, instance):
    conductor = make(2, 2)
    conductor.index.add(1, request().keys[:8])
    conductor.cluster.free_at_s[1] = 9.0
    decision = conductor.decide(request(), 0.0)
    conductor.failed(instance)
    held, idle = conductor.index.match(request().keys).tolist(), state(conductor)
    what = f"commit: decision.{role} must be an instance that is up, got {instance}, which is down"
    with pytest.raises(InvalidArgument, match=what):
        conductor.commit(decision)
    assert conductor.index.match(request().keys).tolist() == held
    assert state(conductor) == idle and not conductor.reservations.open
    conductor.commit(conductor.decide(request(), 0.0))
