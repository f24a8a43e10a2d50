"""Admission under overload. A step takes 10 ms and 1 ms a request; 0.02 s hold 10 of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_serving.conductor import (
    AcceptAll,
    Baseline,
    Cluster,
    Conductor,
    EarlyRejection,
    InvalidArgument,
    KVCacheCentric,
    Limits,
    LoadBalance,
    LocalCacheAware,
    PredictiveRejection,
    PrefixIndex,
    Random,
    Role,
    RoundRobin,
    Slo,
    Why,
)

from .support import COSTS, make, request

SLO = Slo(ttft_s=5, tbt_s=0.02)


def test_ttft_over_its_objective_is_rejected():
    for admission in (Baseline(), EarlyRejection(), PredictiveRejection()):
        conductor = make(1, slo=SLO, admission=admission)
        conductor.cluster.free_at_s[0] = 4.0
        assert conductor.decide(request(), 0.0).accepted, "4 + 1 s is 5 s"
        conductor.cluster.free_at_s[0] = 4.001
        decision = conductor.decide(request(), 0.0)
        assert not decision.accepted and decision.reason.why is Why.PREFILL_LOAD
        assert str(decision.reason) == "TTFT 5.001 s is 1.00 of its objective, over 1.00"
        assert decision.prefill is not None and decision.decode is None


def test_wait_since_arrival_counts_toward_ttft():
    conductor = make(1, slo=SLO, admission=EarlyRejection())
    decision = conductor.decide(request(waited_s=4.0), 100.0)
    assert str(decision.reason) == "TTFT 5.000 s and TBT 0.0110 s are predicted"
    decision = conductor.decide(request(waited_s=4.5), 100.0)
    assert not decision.accepted
    assert str(decision.reason) == "TTFT 5.500 s is 1.10 of its objective, over 1.00"
    with pytest.raises(InvalidArgument, match="Request: waited_s must be at least 0, got -1"):
        request(waited_s=-1)


def test_a_request_may_have_objectives_of_its_own():
    for admission in (Baseline(), EarlyRejection(), PredictiveRejection()):
        conductor = make(1, slo=SLO, admission=admission)
        conductor.cluster.free_at_s[0] = 4.001
        assert conductor.decide(request(slo=Slo(ttft_s=6, tbt_s=1)), 0.0).accepted
        decision = conductor.decide(request(slo=Slo(ttft_s=2, tbt_s=1)), 0.0)
        assert str(decision.reason) == "TTFT 5.001 s is 2.50 of its objective, over 1.00"
    conductor = full(make(1, admission=Baseline()))
    conductor.commit(conductor.decide(request(1, slo=Slo(ttft_s=6, tbt_s=1e-6)), 0.0))
    assert conductor.prefilled(1, 0.0).reason.why is Why.DECODE_LOAD
    with pytest.raises(InvalidArgument, match="Request: slo must be"):
        request(slo=5.0)


def full(conductor, batch=10):
    conductor.cluster.batch_size[-1] = batch
    return conductor


@pytest.mark.parametrize("pre_select", [False, True])
def test_the_baseline_wastes_a_prefill(pre_select):
    conductor = full(make(1, slo=SLO, admission=Baseline(pre_select=pre_select)))
    decision = conductor.decide(request(), 0.0)
    assert decision.accepted and (decision.decode is not None) is pre_select
    assert decision.reason.why is (Why.ACCEPTED if pre_select else Why.ACCEPTED_PREFILL)
    conductor.commit(decision)
    later = conductor.prefilled(0, 1.0)
    assert not later.accepted and later.reason.why is Why.DECODE_LOAD
    assert later.reason.values["load"] == pytest.approx(0.021 / 0.02)


def test_early_rejection_checks_decode_load_on_arrival():
    conductor = make(1, slo=SLO, admission=EarlyRejection())
    assert full(conductor, 9).decide(request(), 0.0).accepted
    decision = full(conductor, 10).decide(request(), 0.0)
    assert not decision.accepted and decision.reason.why is Why.DECODE_LOAD
    assert decision.decode.instance == 1 and decision.decode.tbt_s == pytest.approx(0.021)


def test_early_rejection_checks_mean_load_and_the_chosen_instance():
    """Batches of 3 and 15 take 13 and 25 ms: the next request makes the mean 19.5 ms."""
    conductor = make(1, 2, slo=SLO, admission=EarlyRejection())
    conductor.cluster.batch_size[1:] = 3, 15
    assert conductor.decide(request(), 0.0).accepted
    conductor.cluster.batch_size[1] = 5
    decision = conductor.decide(request(), 0.0)
    assert decision.decode.tbt_s == pytest.approx(0.016), "it alone would do"
    assert decision.reason.values["tbt_s"] == pytest.approx((0.016 + 0.025) / 2)

    conductor.cluster.batch_size[1:] = 10, 3
    conductor.cluster.reserved_requests[2] = 20  # so that it is not chosen
    assert conductor.decide(request(), 0.0).reason.values["tbt_s"] == pytest.approx(0.021)
    conductor.admission = EarlyRejection(per_instance=False)
    assert conductor.decide(request(), 0.0).accepted


def test_early_rejection_may_check_again_after_prefill():
    for check_again in (True, False):
        conductor = make(1, slo=SLO, admission=EarlyRejection(check_again=check_again))
        conductor.commit(conductor.decide(request(), 0.0))
        later = full(conductor).prefilled(0, 1.0)
        assert later.accepted is not check_again


def test_only_prediction_counts_requests_still_in_prefill():
    """15 are taken at once, for none is decoded yet; they meet when their prefills are over."""
    asked = [request(i, num_blocks=1, first_key=1000 * i) for i in range(15)]
    early = make(1, slo=SLO, admission=EarlyRejection(check_again=False))
    predictive = make(1, slo=SLO, admission=PredictiveRejection(decode_s=100))
    taken = {}
    for conductor in (early, predictive):
        decisions = [conductor.decide(one, 0.0) for one in asked]
        assert all(decision.accepted for decision in decisions), "nothing is reserved yet"
        for one in asked:
            decision = conductor.decide(one, 0.0)
            if decision.accepted:
                conductor.commit(decision)
        taken[conductor] = len(conductor.in_flight)
    assert taken == {early: 15, predictive: 10}
    refused = predictive.decide(asked[14], 0.0)
    assert refused.reason.why is Why.FORECAST_LOAD
    assert "when its prefill ends, TBT will be 1.05 of its objective" in str(refused.reason)


def test_prediction_discounts_requests_that_will_have_finished():
    """10 are decoded now. In 1 s, when this prefill ends, all have been decoded for over t_d."""
    early = make(1, slo=SLO, admission=EarlyRejection())
    predictive = make(1, slo=SLO, admission=PredictiveRejection(decode_s=0.8))
    for conductor in (early, predictive):
        for number in range(10):
            one = request(number + 1, num_blocks=1, first_key=1000 * number)
            conductor.commit(conductor.decide(one, 0.0))
            assert conductor.prefilled(number + 1, 0.1).accepted
        conductor.cluster.free_at_s[0] = 0
    assert not early.decide(request(), 0.1).accepted
    assert predictive.decide(request(), 0.1).accepted
    again = PredictiveRejection(decode_s=1.1)
    predictive.admission = again
    assert predictive.decide(request(), 0.1).reason.why is Why.FORECAST_LOAD


def test_prediction_averages_over_decode_instances():
    conductor = make(1, 2, slo=SLO, admission=PredictiveRejection(decode_s=100))
    for number in range(10):
        conductor.in_flight.put(request(number + 1), 1, 0.0)
    decision = conductor.decide(request(), 0.0)
    assert decision.accepted and decision.decode.instance == 2
    conductor.admission = PredictiveRejection(Limits(0.7), decode_s=100)
    decision = conductor.decide(request(), 0.0)
    assert decision.reason.values["load"] == pytest.approx((0.020 + 0.011) / 2 / 0.02)


def test_low_priorities_are_rejected_first():
    admission = EarlyRejection(Limits(1.0, {0: 0.62, 2: 0.92}))
    conductor = make(1, slo=SLO, admission=admission)
    taken = {}
    for batch in range(12):
        full(conductor, batch)
        for priority in range(3):
            decision = conductor.decide(request(priority=priority), 0.0)
            taken.setdefault(priority, 0)
            taken[priority] += decision.accepted
    assert taken == {0: 2, 1: 10, 2: 8}, "12.4, 20 and 18.4 ms are their limits"


def test_accept_all_waits_for_room():
    conductor = make(1, slo=Slo(1e-9, 1e-9), admission=AcceptAll(), capacity_tokens=1000)
    conductor.cluster.kv_tokens[1] = 1000
    conductor.commit(conductor.decide(request(), 0.0))
    assert conductor.prefilled(0, 1.0).accepted


def test_decode_without_room_is_rejected():
    conductor = make(1, admission=EarlyRejection(), capacity_tokens=1000)
    conductor.cluster.kv_tokens[1] = 1
    assert conductor.decide(request(), 0.0).reason.why is Why.NO_DECODE_ROOM
    conductor.admission = Baseline()
    conductor.commit(conductor.decide(request(), 0.0))
    later = conductor.prefilled(0, 1.0)
    assert later.reason.why is Why.NO_DECODE_ROOM and later.decode is None


@pytest.mark.parametrize("rule", [AcceptAll, Baseline, EarlyRejection, PredictiveRejection])
def test_request_too_large_for_every_instance_is_rejected_on_arrival(rule):
    conductor = make(2, 2, admission=rule(), capacity_tokens=[0, 0, 900, 1000])
    assert conductor.decide(request(), 0.0).accepted
    for longer in ({"num_output_tokens": 1}, {"max_output_tokens": 1}):
        decision = conductor.decide(request(**longer), 0.0)
        assert not decision.accepted
        assert str(decision.reason) == "1001 tokens are more than any instance holds: 1000 at most"
    conductor.cluster.up[3] = False
    assert conductor.decide(request(), 0.0).reason.why is not Why.TOO_LONG, "it may come back"


def test_waiting_request_goes_to_an_instance_that_can_hold_it():
    conductor = make(1, 2, admission=AcceptAll(), capacity_tokens=[0, 999, 1000])
    conductor.cluster.batch_size[2] = 100
    assert conductor.decide(request(), 0.0).decode.instance == 2

    both = Cluster([Role.BOTH] * 3, capacity_tokens=[999, 1000, 999])
    conductor = Conductor(both, PrefixIndex(3), COSTS, SLO, admission=AcceptAll())
    both.free_at_s[1] = 5.0
    assert conductor.decide(request(), 0.0).prefill.instance == 1
    assert conductor.decide(request(num_blocks=11), 0.0).reason.why is Why.TOO_LONG


limits = st.sampled_from([Limits(), Limits(0.5), Limits(0.9, {1: 0.3})])
admissions = st.one_of(
    st.builds(Baseline, limits, pre_select=st.just(False)),
    st.builds(EarlyRejection, limits),
    st.builds(PredictiveRejection, limits, decode_s=st.sampled_from([0.5, 5.0, 500.0])),
)
policies = st.sampled_from([KVCacheCentric, LocalCacheAware, LoadBalance, RoundRobin, Random])
arrivals = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 30), st.integers(0, 500), st.integers(0, 1)),
    min_size=1,
    max_size=40,
)


@given(admissions, policies, arrivals, st.integers(0, 5))
@settings(max_examples=150, deadline=None)
def test_accepted_requests_are_predicted_to_meet_the_slo(admission, policy, asked, seed):
    slo = Slo(ttft_s=6, tbt_s=0.016)
    conductor = make(
        3, 2, slo=slo, capacity_tokens=20_000, policy=policy(), admission=admission, seed=seed
    )
    cluster, now_s = conductor.cluster, 0.0
    for number, (family, blocks, wait_ms, priority) in enumerate(asked):
        now_s += wait_ms * 1e-3
        one = request(number, blocks, 1000 * family, num_output_tokens=100, priority=priority)
        decision = conductor.decide(one, now_s)
        assert str(decision).startswith(f"request {number} is ")
        if decision.accepted:
            assert decision.prefill.ttft_s / slo.ttft_s <= admission.limits.of(one)
            if decision.decode is not None:
                assert decision.decode.tbt_s / slo.tbt_s <= admission.limits.of(one)
            conductor.commit(decision)
            if number % 3 == 0:
                later = conductor.prefilled(number, now_s)
                if later.accepted:
                    checked = getattr(admission, "check_again", True)
                    within = later.decode.tbt_s / slo.tbt_s <= admission.limits.of(one)
                    assert within or not checked
        else:
            load, limit = decision.reason.values.get("load"), admission.limits.of(one)
            assert decision.reason.why is Why.NO_DECODE_ROOM or load > limit
        decoders = slice(3, 5)
        held = cluster.kv_tokens[decoders] + cluster.reserved_tokens[decoders]
        if type(admission) is not PredictiveRejection:  # it reserves memory that will be free
            assert (held <= cluster.capacity_tokens[decoders]).all()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Limits(0), r"a limit must be in \(0, 1\], got 0"),
        (lambda: Limits("x"), r"a limit must be in \(0, 1\], got 'x'"),
        (lambda: Limits(1.0, 5), "Limits: by_priority must be a Mapping, got 5"),
        (lambda: Limits(1, {3: 1.5}), r"a limit must be in \(0, 1\], got 1.5"),
        (lambda: Baseline(limits=0.5), "Baseline: limits must be a Limits, got 0.5"),
        (lambda: EarlyRejection(limits=0.5), "EarlyRejection: limits must be a Limits, got 0.5"),
        (lambda: PredictiveRejection(None), "PredictiveRejection: limits must be a Limits, got"),
        (lambda: PredictiveRejection(decode_s=0), "decode_s must be positive, got 0"),
        (lambda: Slo(1, 0), "Slo: tbt_s must be positive, got 0"),
        (lambda: Slo(float("nan"), 1), "Slo: ttft_s must be positive, got nan"),
    ],
)
def test_bad_arguments_are_rejected(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call()
