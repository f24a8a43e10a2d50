"""Prefilled requests take precedence over those for which memory is only reserved."""

from mooncake_serving.conductor import (
    Cluster,
    Conductor,
    Costs,
    LinearDecode,
    NicTransfer,
    PolynomialPrefill,
    PredictiveRejection,
    PrefixIndex,
    Request,
    Role,
    Slo,
    Why,
)

COSTS = Costs(
    PolynomialPrefill(0.0, 0.001, 0.0), LinearDecode(0.01, 0.0, 0.0), NicTransfer(1.0, 1e9)
)


def test_reservations_for_later_requests_keep_out_no_prefilled_request():
    cluster = Cluster([Role.PREFILL, Role.DECODE], capacity_tokens=1000)
    conductor = Conductor(
        cluster,
        PrefixIndex(2),
        COSTS,
        Slo(ttft_s=30, tbt_s=1),
        # By the forecast each is over before the next one begins: more is promised than there is.
        admission=PredictiveRejection(decode_s=0.1),
    )
    for request_id in range(3):
        decision = conductor.decide(Request(request_id, 600), now_s=0.0)
        if decision.accepted:
            conductor.commit(decision)
    assert cluster.reserved_tokens[1] > 0
    reserved = sorted(conductor.reservations.open)
    first = conductor.prefilled(reserved[0], now_s=0.6)
    assert first.accepted
    for request_id in reserved[1:]:  # but memory that is in use is in use
        later = conductor.prefilled(request_id, now_s=1.2)
        assert later.reason.why is Why.NO_DECODE_ROOM
    conductor.decoded(reserved[0])
    assert not cluster.reserved_tokens.any() and not conductor.reservations.coming_tokens.any()
