"""The life of a request, and that the reservations balance."""

import math
import sys
import threading
from dataclasses import replace
from functools import partial

import numpy as np
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
    LoadBalance,
    PredictiveRejection,
    PrefixIndex,
    Random,
    Request,
    Role,
    RoundRobin,
    Slo,
    Why,
)

from ..threads import in_threads
from .support import COSTS, make, request, state


def test_request_life_cycle():
    conductor = make(2)
    cluster, index = conductor.cluster, conductor.index
    index.add(1, request().keys[:8])
    cluster.free_at_s[1] = 11.0
    idle = state(conductor)

    decision = conductor.decide(request(num_output_tokens=50), now_s=10.0)
    assert state(conductor) == idle and index.holders(9) == [], "to decide reserves nothing"
    assert decision.accepted and decision.prefill.instance == 0
    conductor.commit(decision)
    assert cluster.free_at_s[0] == pytest.approx(10.28), "0.08 s of fetch, 0.2 s of prefill"
    assert cluster.sending_until_s[1] == pytest.approx(10.08) and cluster.num_sending[1] == 1
    assert index.match(request().keys).tolist() == [10, 8, 0]
    assert cluster.reserved_requests[2] == 1 and cluster.reserved_tokens[2] == 1050
    assert len(conductor.in_flight) == 1

    conductor.fetched(decision)
    conductor.fetched(decision)
    assert cluster.num_sending[1] == 0
    later = conductor.prefilled(0, now_s=10.3)
    assert later.accepted and later.decode.instance == 2
    assert (cluster.batch_size[2], cluster.kv_tokens[2]) == (1, 1000)
    assert (cluster.reserved_requests[2], cluster.reserved_tokens[2]) == (0, 50)

    cluster.kv_tokens[2] += 20  # as they are generated
    cluster.reserved_tokens[2] -= 20
    conductor.decoded(0, num_generated=20)
    assert state(conductor) == idle and len(conductor.in_flight) == 0


def test_owner_adjusts_counters_and_overwrites_times():
    conductor = make(2)
    cluster = conductor.cluster
    conductor.index.add(1, request().keys[:8])
    cluster.free_at_s[1] = 11.0
    decision = conductor.decide(request(), now_s=10.0)
    conductor.commit(decision)
    cluster.free_at_s[:], cluster.drain_s[:], cluster.sending_until_s[:] = 12.0, 1.0, 13.0
    for name in state(conductor):
        getattr(cluster, name)[:] += 7
    conductor.fetched(decision)
    conductor.prefilled(0, now_s=12.0)
    conductor.decoded(0)
    assert state(conductor) == {name: [7, 7, 7] for name in state(conductor)}
    times = np.stack((cluster.free_at_s, cluster.drain_s, cluster.sending_until_s))
    assert (times.T == (12.0, 1.0, 13.0)).all()


def test_decision_prints_as_sentences():
    conductor = make(1)
    assert str(conductor.decide(request(7), 0.0)) == (
        "request 7 is taken: TTFT 1.000 s and TBT 0.0110 s are predicted\n"
        "  prefill on 0: the shortest TTFT, 1.000 s, with 0 tokens of its own cache\n"
        "  decode on 1: the shortest TBT, 0.0110 s, in a batch of 1"
    )


def test_the_queue_grows_by_what_is_committed():
    conductor = make(2, admission=AcceptAll())
    chosen = []
    for number in range(4):
        decision = conductor.decide(request(number, first_key=100 * number), 0.0)
        conductor.commit(decision)
        chosen.append((decision.prefill.instance, round(decision.prefill.ttft_s, 6)))
    assert chosen == [(0, 1.0), (1, 1.0), (0, 2.0), (1, 2.0)]
    assert conductor.decide(request(9, first_key=900), 1.5).prefill.ttft_s == pytest.approx(1.5)


@pytest.mark.parametrize("wait_s, first_s, second_s", [(0.0, 0.28, 1.28), (0.5, 0.78, 1.7)])
def test_the_queue_waits_for_a_fetch_which_runs_meanwhile(wait_s, first_s, second_s):
    """A fetch of 0.08 s and a prefill of 0.2 s are in front of a prefill of 1 s."""
    conductor = make(2)
    conductor.index.add(1, request().keys[:8])
    conductor.cluster.free_at_s[:2] = wait_s, 9.0
    first = conductor.decide(request(0), 0.0)
    assert first.prefill.fetch and first.prefill.ttft_s == pytest.approx(first_s)
    conductor.commit(first)
    second = conductor.decide(request(1, first_key=100), 0.0).prefill
    assert second.instance == 0 and second.ttft_s == pytest.approx(second_s)


def test_decode_stays_where_promised_unless_down():
    conductor = make(1, 3)
    conductor.commit(conductor.decide(request(0), 0.0))
    conductor.commit(conductor.decide(request(1), 0.0))
    conductor.cluster.batch_size[1] = 5
    assert conductor.prefilled(0, 1.0).decode.instance == 1, "promised, though others are idle"
    conductor.cluster.up[2] = False
    assert conductor.prefilled(1, 1.0).decode.instance == 3


def test_decode_moves_if_the_promised_instance_has_no_room():
    conductor = make(1, 2, capacity_tokens=1500)
    conductor.commit(conductor.decide(request(), 0.0))
    conductor.cluster.kv_tokens[1] = 600  # more than was foreseen
    assert conductor.prefilled(0, 1.0).decode.instance == 2


def test_combined_instance_keeps_its_requests():
    cluster = Cluster([Role.BOTH, Role.BOTH, Role.DECODE])
    conductor = Conductor(cluster, PrefixIndex(3), COSTS, Slo(30, 0.1))
    cluster.free_at_s[0] = 1.0
    cluster.batch_size[1] = 50
    decision = conductor.decide(request(), 0.0)
    assert decision.prefill.instance == decision.decode.instance == 1
    assert decision.decode.reason.why is Why.SAME_INSTANCE


@pytest.mark.parametrize("policy", [LoadBalance, KVCacheCentric, RoundRobin, Random])
@pytest.mark.parametrize(
    "admission", [Baseline, EarlyRejection, PredictiveRejection, lambda: Baseline(pre_select=True)]
)
@pytest.mark.parametrize("full", [{"kv_tokens": 3500}, {"batch_size": 8}])
def test_combined_instance_is_chosen_only_with_decode_room(policy, admission, full):
    cluster = Cluster([Role.BOTH] * 4, capacity_tokens=4000, max_batch_size=8)
    conductor = Conductor(
        cluster, PrefixIndex(4), COSTS, Slo(30, 0.1), policy=policy(), admission=admission()
    )
    conductor.index.add(0, request().keys)
    for name, value in full.items():
        getattr(cluster, name)[:3] = value
        if admission is PredictiveRejection:  # it looks at what it has reserved itself
            for number in range(24):
                one = Request(1000 + number, 3500 if name == "kv_tokens" else 1)
                conductor.in_flight.put(one, number // 8, 0.0)
    for number in range(3):
        decision = conductor.decide(request(number), number)
        assert decision.accepted and decision.prefill.instance == 3, decision
        conductor.commit(decision)
        assert conductor.prefilled(number, number + 1.0).accepted


def test_a_coupled_prefill_is_refused_if_no_instance_has_room():
    cluster = Cluster([Role.BOTH] * 2, capacity_tokens=4000)
    conductor = Conductor(cluster, PrefixIndex(2), COSTS, Slo(30, 0.1))
    cluster.kv_tokens[:] = 3500
    assert conductor.decide(request(), 0.0).reason.why is Why.NO_DECODE_ROOM
    conductor.admission = AcceptAll()
    assert conductor.decide(request(), 0.0).accepted, "it waits there"


ADMISSIONS = [
    AcceptAll,
    Baseline,
    EarlyRejection,
    PredictiveRejection,
    lambda: Baseline(pre_select=True),
]


@pytest.mark.parametrize("policy", [LoadBalance, KVCacheCentric, RoundRobin, Random])
@pytest.mark.parametrize("admission", ADMISSIONS)
@pytest.mark.parametrize("decoder", ["none", "down", "too small", "full"])
def test_a_prefill_instance_is_not_chosen_if_none_can_decode_for_it(policy, admission, decoder):
    """Instance 0 is idle and has the prompt, but only instance 1 can decode it."""
    roles = [Role.PREFILL, Role.BOTH] + [Role.DECODE] * 2 * (decoder != "none")
    capacity_tokens = {"none": 4000, "down": 4000, "too small": [9, 4000, 900, 4000], "full": 4000}
    cluster = Cluster(roles, capacity_tokens=capacity_tokens[decoder], max_batch_size=8)
    conductor = Conductor(
        cluster,
        PrefixIndex(len(roles)),
        COSTS,
        Slo(30, 0.1),
        policy=policy(),
        admission=admission(),
    )
    conductor.index.add(0, request().keys)
    cluster.free_at_s[1] = 1.0
    if decoder == "down":
        cluster.up[2:] = False
    elif decoder == "too small":
        cluster.up[3] = False
    elif decoder == "full":
        cluster.batch_size[2:] = 8
        for number in range(16):  # a forecast looks at what was reserved
            conductor.in_flight.put(Request(1000 + number, 1), 2 + number // 8, 0.0)
    for number in range(3):
        decision = conductor.decide(request(number), number)
        waits = decoder == "full" and admission is AcceptAll
        assert decision.accepted and (decision.prefill.instance == 1 or waits), decision
        conductor.commit(decision)
        assert conductor.prefilled(number, number + 0.5).accepted


@pytest.mark.parametrize("admission", ADMISSIONS[1:])
def test_full_mixed_cluster_is_reported(admission):
    cluster = Cluster([Role.PREFILL, Role.BOTH], max_batch_size=8)
    conductor = Conductor(cluster, PrefixIndex(2), COSTS, Slo(30, 0.1), admission=admission())
    cluster.batch_size[1] = 8
    for number in range(8):
        conductor.in_flight.put(Request(1000 + number, 1), 1, 0.0)
    decision = conductor.decide(request(), 0.0)
    assert decision.prefill.instance == 1, "no other is any better"
    if not decision.accepted:
        assert decision.reason.why is Why.NO_DECODE_ROOM


def test_no_instance_is_there():
    conductor = make(1, 1)
    conductor.cluster.up[1] = False
    assert conductor.decide(request(), 0.0).reason.why is Why.NO_DECODE_INSTANCE
    conductor.cluster.up[0] = False
    assert conductor.decide(request(), 0.0).reason.why is Why.NO_PREFILL_INSTANCE


steps = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "fetched", "prefilled", "decoded", "failed"]),
        st.integers(0, 15),
        st.integers(1, 20),
    ),
    max_size=80,
)


@given(steps, st.sampled_from([AcceptAll, Baseline]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_reservations_balance_to_zero(steps, admission, random):
    """Whatever happens to requests: when all are over, nothing is left of them."""
    policy = Random() if random else KVCacheCentric()
    conductor = make(3, 2, slo=Slo(20, 0.02), policy=policy, admission=admission())
    now_s, decisions = 0.0, {}
    for what, number, blocks in steps:
        now_s += 0.05
        if what == "arrive" and number not in conductor.reservations.open:
            decision = conductor.decide(request(number, blocks, 100 * (number % 3)), now_s)
            if decision.accepted:
                conductor.commit(decision)
                decisions[number] = decision
        elif what == "failed" and number < 5 and blocks == 1:
            for lost in conductor.failed(number):
                assert lost not in conductor.reservations.open
            conductor.recovered(number)
        elif number in conductor.reservations.open:
            if what == "fetched":
                conductor.fetched(decisions[number])
            elif what == "prefilled" and number not in conductor.reservations.decoding:
                conductor.prefilled(number, now_s)
            elif what == "decoded":
                conductor.decoded(number)
        assert all(min(values) >= 0 for values in state(conductor).values())
        assert len(conductor.in_flight) <= len(conductor.reservations.open)
    for number in list(conductor.reservations.open):
        conductor.decoded(number)
    assert not any(any(values) for values in state(conductor).values())
    assert len(conductor.in_flight) == 0 and not conductor.reservations.fetching
    assert not conductor.reservations.uncomputed


def test_cancelled_request_leaves_the_queue():
    conductor = make(1)
    for number in range(40):
        decision = conductor.decide(request(number), 0.0)
        assert decision.accepted and decision.prefill.wait_s == pytest.approx(0), decision
        conductor.commit(decision)
        conductor.decoded(number)
    for number in range(40, 43):
        conductor.commit(conductor.decide(request(number, first_key=100 * number), 0.0))
    conductor.decoded(41)
    assert conductor.cluster.free_at_s[0] == pytest.approx(2.0)
    conductor.prefilled(40, 1.0)
    conductor.decoded(40)
    assert conductor.cluster.free_at_s[0] == pytest.approx(2.0), "it was prefilled"


def test_cancelled_request_takes_its_fetch_out_of_the_queue():
    """Nothing is behind one that fetches for 0.08 s, or another one is, which moves up."""
    for behind in (False, True):
        conductor = make(2)
        conductor.index.add(1, request().keys[:8])
        conductor.cluster.free_at_s[1] = 9.0
        first = conductor.decide(request(0), 0.0)
        conductor.commit(first)
        assert first.prefill.fetch.seconds == pytest.approx(0.08) and first.prefill.instance == 0
        if behind:
            second = conductor.decide(request(1, first_key=100), 0.01)
            conductor.commit(second)
            assert second.prefill.fetch is None and second.prefill.instance == 0
        conductor.decoded(0)
        expected = 0.01 + second.prefill.occupied_s if behind else 0.0
        assert conductor.cluster.free_at_s[0] == pytest.approx(expected)


@pytest.mark.parametrize("fetched", [False, True])
def test_cancelled_request_releases_its_share_of_the_source(fetched):
    """Two fetches of 0.08 s, of which the second is given up before or after it is over."""
    conductor = make(2)
    conductor.index.add(1, request().keys[:8])
    conductor.index.add(1, request(first_key=100).keys[:8])
    conductor.cluster.free_at_s[1] = 9.0
    conductor.commit(conductor.decide(request(0), 0.0))
    second = conductor.decide(request(1, first_key=100), 0.0)
    conductor.commit(second)
    assert second.prefill.fetch and second.prefill.instance == 0
    assert conductor.cluster.sending_until_s[1] == pytest.approx(0.16)
    if fetched:
        conductor.fetched(second)
    conductor.decoded(1)
    assert conductor.cluster.sending_until_s[1] == pytest.approx(0.16 if fetched else 0.08)
    assert conductor.cluster.num_sending[1] == 1
    assert conductor.cluster.free_at_s[0] == pytest.approx(0.28)


def test_late_fetch_report_does_not_affect_a_newer_fetch():
    """Request 0 is given up while it fetches from 1, and is decided about again: from 2."""
    conductor = make(3)
    conductor.index.add(1, request().keys[:8])
    conductor.cluster.free_at_s[1:3] = 9.0
    first = conductor.decide(request(), 0.0)
    conductor.commit(first)
    conductor.decoded(0)
    for instance in (0, 1):
        conductor.index.clear(instance)
    conductor.index.add(2, request().keys[:8])
    second = conductor.decide(request(), 0.1)
    conductor.commit(second)
    assert (first.prefill.fetch.source, second.prefill.fetch.source) == (1, 2)
    conductor.fetched(first)
    assert conductor.cluster.num_sending.tolist() == [0, 0, 1, 0]
    conductor.fetched(second)
    assert conductor.cluster.num_sending.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("policy", [Random, KVCacheCentric])
def test_decisions_are_deterministic(policy):
    def run(seed):
        conductor = make(5, 3, policy=policy(), seed=seed)
        told = []
        for number in range(60):
            one = request(number, 1 + number % 7, 100 * (number % 4))
            decision = conductor.decide(one, 0.1 * number)
            told.append(str(decision))
            conductor.commit(decision)
        return told

    assert run(3) == run(3)
    assert (run(3) == run(4)) is (policy is KVCacheCentric)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: Request(0, 0), "Request: num_tokens must be at least 1, got 0"),
        (lambda: Request(1, 1.5), "Request: num_tokens must be an integer, got 1.5"),
        (lambda: Request(1, True), "Request: num_tokens must be an integer, got True"),
        (lambda: Request(1, 9, block_size=2.0), "block_size must be an integer, got 2.0"),
        (lambda: Request(1, 9, num_output_tokens=0.5), "num_output_tokens must be an integer"),
        (lambda: Slo(True, 1.0), "Slo: ttft_s must be positive, got True"),
        (lambda: Request(0, 512, (1, 2)), "keys must be at most 1 for 512 tokens in blocks of 512"),
        (lambda: Request(0, 512, None), "Request: keys must be a tuple of integers, got None"),
        (lambda: Request([1], 9), r"Request: request_id must be hashable, got \[1\]"),
        (lambda: Request(0, 512, ("x",)), "keys must be a tuple of integers, got 'x' among them"),
        (lambda: Request(0, 1024, (1, 1.5)), "keys must be a tuple of integers, got 1.5 among"),
        (lambda: Request(0, 512, (True,)), "keys must be a tuple of integers, got True among"),
        (lambda: Request(0, 512, {1}), r"keys must be a tuple of integers, got \{1\}"),
        (lambda: Request(0, 512, "1"), "keys must be a tuple of integers, got '1'"),
        (lambda: AcceptAll(needs_room=1), "AcceptAll: needs_room must be True or False, got 1"),
        (lambda: Baseline(needs_room=None), "Baseline: needs_room must be True or False, got None"),
        (lambda: Baseline(pre_select=0), "Baseline: pre_select must be True or False, got 0"),
        (
            lambda: EarlyRejection(per_instance="no"),
            "EarlyRejection: per_instance must be True or False, got 'no'",
        ),
        (lambda: EarlyRejection(check_again="no"), "check_again must be True or False, got 'no'"),
        (
            lambda: PredictiveRejection(check_again=2),
            "PredictiveRejection: check_again must be True or False, got 2",
        ),
        (
            lambda: KVCacheCentric(overlap_fetch="no"),
            "KVCacheCentric: overlap_fetch must be True or False, got 'no'",
        ),
        (lambda: KVCacheCentric(recompute_if_cheaper=1), "recompute_if_cheaper must be True or"),
        (lambda: Request(0, 9, priority="x"), "Request: priority must be an integer, got 'x'"),
        (lambda: make().decide(request(), math.nan), "decide: now_s must be a finite number, got"),
        (lambda: make().decide(request(), "0"), "decide: now_s must be a finite number, got '0'"),
        (lambda: make().prefilled([5], 0.0), r"must be of a committed request, got \[5\]"),
        (lambda: Slo(10**400, math.nan), "Slo: tbt_s must be positive, got nan"),
        (lambda: make().decide(None, 0.0), "decide: request must be a Request, got None"),
        (
            lambda: Cluster([Role.BOTH], capacity_tokens=2**63),
            "capacity_tokens must be an integer of at least 0 that int64 holds, .* got 9223372036",
        ),
        (lambda: Cluster([Role.BOTH], max_batch_size=[[1], [1, 2]]), "max_batch_size must be an"),
        (lambda: Cluster(4), "Cluster: roles must be a list of Role, got 4"),
        (lambda: Cluster([]), r"Cluster: roles must be of at least one instance, got \[\]"),
        (lambda: make(1, seed=1.5), "Conductor: seed must be an integer, got 1.5"),
        (lambda: make(1, seed=-1), "Conductor: seed must be at least 0, got -1"),
        (lambda: Cluster([Role.PREFILL, 9]), "Cluster: roles must be of Role"),
        (
            lambda: Conductor(Cluster([Role.BOTH]), PrefixIndex(2), COSTS, Slo(1, 1)),
            "Conductor: index must be of 1 instances, got 2",
        ),
        (
            lambda: Conductor(None, None, None, None),
            "Conductor: cluster must be a Cluster, got None",
        ),
        (
            lambda: Conductor(Cluster([Role.BOTH]), None, COSTS, Slo(1, 1)),
            "Conductor: index must be an Index, got None",
        ),
        (
            lambda: Conductor(Cluster([Role.BOTH]), PrefixIndex(1), None, Slo(1, 1)),
            "Conductor: costs must be a Costs, got None",
        ),
        (
            lambda: Conductor(Cluster([Role.BOTH]), PrefixIndex(1), COSTS, 30),
            "Conductor: slo must be a Slo, got 30",
        ),
        (lambda: make(policy=Random), "policy must be a PrefillPolicy, got <class .*Random"),
        (lambda: make(admission="all"), "Conductor: admission must be an Admission, got 'all'"),
        (lambda: make(tiers=1), "Conductor: tiers must be Tiers, got 1"),
        (lambda: make().commit(None), "commit: decision must be a Decision, got None"),
        (lambda: make().fetched(None), "fetched: decision must be a Decision, got None"),
        (lambda: make().prefilled(5, 0.0), "prefilled: request_id must be of a committed request"),
        (lambda: make().decoded(5), "decoded: request_id must be of a committed request, got 5"),
    ],
)
def test_bad_arguments_are_rejected(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call()


@pytest.mark.parametrize(
    "keys", [[1, 2], np.array([1, 2]), np.array([1, 2], np.uint64), range(1, 3)], ids=repr
)
def test_key_containers_are_interchangeable(keys):
    given, plain = Request(0, 1024, keys), Request(0, 1024, (1, 2))
    assert given == plain and hash(given) == hash(plain)
    assert given.keys == (1, 2) and {type(key) for key in given.keys} == {int}
    conductor = make()
    assert conductor.decide(given, 0.0) == conductor.decide(plain, 0.0)


IDS = ["chatcmpl-1", 2**64 + 5, -1, ("tenant", 7), None]


@pytest.mark.parametrize("request_id", IDS)
def test_request_id_may_be_any_hashable(request_id):
    conductor = make(2)
    conductor.index.add(1, request().keys[:8])
    conductor.cluster.free_at_s[1] = 11.0
    idle = state(conductor)
    decision = conductor.decide(request(request_id), 10.0)
    assert f"request {request_id} is taken" in str(decision)
    conductor.commit(decision)
    assert conductor.cluster.reserved_tokens[2] == 1000 and conductor.cluster.num_sending[1] == 1
    conductor.fetched(decision)
    assert conductor.prefilled(request_id, 11.0).accepted
    assert conductor.cluster.batch_size[2] == 1 and len(conductor.in_flight) == 1
    conductor.decoded(request_id)
    assert state(conductor) == idle and len(conductor.in_flight) == 0

    conductor.commit(conductor.decide(request(request_id), 20.0))
    assert conductor.failed(2) == [request_id] and len(conductor.in_flight) == 0


def test_requests_with_any_id_leave_in_any_order():
    conductor = make(1, admission=AcceptAll())
    for request_id in IDS:
        conductor.commit(conductor.decide(request(request_id), 0.0))
    for number, request_id in enumerate((IDS[1], IDS[0], IDS[4], IDS[2], IDS[3])):
        assert len(conductor.in_flight) == len(IDS) - number
        assert conductor.in_flight.load_at(1e3, 1e6, 2).batch_size[1] == len(IDS) - number
        conductor.prefilled(request_id, 1.0)
        conductor.decoded(request_id)
    assert len(conductor.in_flight) == 0 and not conductor.cluster.batch_size.any()


def everything(conductor):
    cluster = {
        name: array.tolist()
        for name, array in vars(conductor.cluster).items()
        if isinstance(array, np.ndarray)
    }
    reservations = conductor.reservations
    held = conductor.index.match(request().keys).tolist()
    counts = (
        len(reservations.open),
        len(reservations.decoding),
        len(reservations.fetching),
        len(conductor.in_flight),
    )
    return cluster, held, counts, reservations.coming_tokens.tolist(), dict(reservations.uncomputed)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"accepted": False}, "accepted and not yet committed, got request 'a' refused: TTFT"),
        ({"at_s": math.nan}, "commit: decision.at_s must be a finite number, got nan"),
        ({"instance": 9}, r"commit: decision.prefill must be in \[0, 3\), got 9"),
        ({"source": 9}, r"commit: decision.fetch.source must be in \[0, 3\), got 9"),
        ({"decode": 9}, r"commit: decision.decode must be in \[0, 3\), got 9"),
    ],
)
def test_what_cannot_be_committed_changes_nothing(change, message):
    conductor = make(2)
    conductor.index.add(1, request().keys[:8])
    conductor.cluster.free_at_s[1] = 11.0
    decision = conductor.decide(request("a"), 10.0)
    prefill, decode = decision.prefill, decision.decode
    if "source" in change:
        prefill = replace(prefill, fetch=replace(prefill.fetch, source=change["source"]))
    elif "instance" in change:
        prefill = replace(prefill, instance=change["instance"])
    elif "decode" in change:
        decode = replace(decode, instance=change["decode"])
    else:
        decision = replace(decision, **change)
    before = everything(conductor)
    with pytest.raises(InvalidArgument, match=message):
        conductor.commit(replace(decision, prefill=prefill, decode=decode))
    assert everything(conductor) == before


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda c: c.prefilled("a", math.nan), "prefilled: now_s must be a finite number, got nan"),
        (lambda c: c.decoded("a", 0.5), "decoded: num_generated must be an integer, got 0.5"),
        (lambda c: c.decoded("a", -1), "decoded: num_generated must be at least 0, got -1"),
    ],
)
def test_a_bad_argument_changes_nothing(call, message):
    conductor = make(2)
    conductor.commit(conductor.decide(request("a"), 0.0))
    before = everything(conductor)
    with pytest.raises(InvalidArgument, match=message):
        call(conductor)
    assert everything(conductor) == before


class Fails:
    """A cost that answers until it is told to raise."""

    def __init__(self, cost):
        self.cost, self.raises = cost, False

    def seconds(self, *arguments):
        if self.raises:
            raise RuntimeError("no answer")
        return self.cost.seconds(*arguments)


@pytest.mark.parametrize("what", ["commit", "prefilled"])
def test_raising_cost_model_leaves_no_partial_state(what):
    conductor = make(2)
    costs = replace(COSTS, transfer=Fails(COSTS.transfer), decode=Fails(COSTS.decode))
    conductor.costs = conductor.reservations.costs = costs
    conductor.index.add(1, request().keys[:8])
    conductor.cluster.free_at_s[1] = 11.0
    idle, decision = everything(conductor), conductor.decide(request("a"), 10.0)
    assert decision.prefill.fetch
    calls = {"commit": lambda: conductor.commit(decision)}
    calls["prefilled"] = lambda: conductor.prefilled("a", 11.0)
    if what == "prefilled":
        conductor.commit(decision)
    before = everything(conductor)
    costs.transfer.raises = costs.decode.raises = True
    with pytest.raises(RuntimeError, match="no answer"):
        calls[what]()
    assert everything(conductor) == before
    if what == "prefilled":
        conductor.decoded("a")
        assert state(conductor) == {n: idle[0][n] for n in state(conductor)}, "no cost is asked"


def test_concurrent_decisions_and_reservations():
    conductor = make(2, 2, admission=AcceptAll())
    interval, start = sys.getswitchinterval(), threading.Barrier(8)

    def serve(thread):
        start.wait(60)
        for number in range(100):
            request_id = (thread, number)
            decision = conductor.decide(request(request_id, first_key=100 * number), 0.0)
            conductor.commit(decision)
            conductor.fetched(decision)
            with conductor.lock:
                conductor.index.add(0, range(number, number + 50))
                conductor.index.clear(1)
            if number % 3:
                conductor.prefilled(request_id, 0.1)
            conductor.decoded(request_id)

    sys.setswitchinterval(1e-5)
    try:
        in_threads(*(partial(serve, each) for each in range(8)))
    finally:
        sys.setswitchinterval(interval)
    assert not any(any(values) for values in state(conductor).values())
    assert len(conductor.in_flight) == len(conductor.reservations.open) == 0
    assert not conductor.reservations.uncomputed


def test_a_decision_is_committed_once_and_only_if_accepted():
    conductor = make(1)
    decision = conductor.decide(request(), 0.0)
    conductor.commit(decision)
    with pytest.raises(
        InvalidArgument, match="accepted and not yet committed, got request 0 again"
    ):
        conductor.commit(decision)
    conductor.prefilled(0, 1.0)
    with pytest.raises(InvalidArgument, match="must not be decoded already"):
        conductor.prefilled(0, 1.0)
    conductor.cluster.up[0] = False
    with pytest.raises(InvalidArgument, match="got request 1 refused: no instance that prefills"):
        conductor.commit(conductor.decide(request(1), 0.0))
