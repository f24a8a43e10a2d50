"""Advice on roles: which instance moves, when, and when not."""

import pytest

from mooncake_serving.conductor import InvalidArgument, Role, RoleAdvisor, Slo, Why

from .support import COSTS, make

SLO = Slo(ttft_s=10, tbt_s=0.05)


def advise(conductor, advisor=None, now_s=0.0):
    return (advisor or RoleAdvisor()).advise(conductor.cluster, COSTS.decode, SLO, now_s)


def test_underused_decode_instance_moves_to_prefill():
    conductor = make(2, 3)
    conductor.cluster.free_at_s[:2] = 9, 10
    conductor.cluster.batch_size[2:] = 2, 1, 3
    advice = advise(conductor)
    assert (advice.instance, advice.role) == (3, Role.PREFILL)
    assert advice.reason.why is Why.PREFILL_SHORT
    assert advice.reason.values["prefill_load"] == pytest.approx(0.95)
    assert "prefill load 0.95 over 0.80" in str(advice.reason)


def test_underused_prefill_instance_moves_to_decode():
    conductor = make(3, 2)
    conductor.cluster.free_at_s[:3] = 2, 1, 3
    conductor.cluster.batch_size[3:] = 35  # steps of 45 ms
    advice = advise(conductor)
    assert (advice.instance, advice.role) == (1, Role.DECODE)
    assert advice.reason.why is Why.DECODE_SHORT


def test_memory_use_counts_as_load():
    conductor = make(2, 1, capacity_tokens=1000)
    conductor.cluster.kv_tokens[2] = 900
    assert advise(conductor).role == Role.DECODE


@pytest.mark.filterwarnings("error")
def test_decode_instance_without_memory_has_no_load():
    conductor = make(2, 2, capacity_tokens=0)
    conductor.cluster.free_at_s[:2] = 9, 10
    assert advise(conductor).role == Role.PREFILL
    conductor.cluster.kv_tokens[2:] = 1
    assert advise(conductor) is None, "or more than it can hold"


@pytest.mark.parametrize(
    "waits, batches, why",
    [
        ([7, 7], [1, 1, 1], "0.7 is not high"),
        ([9, 9], [14, 14, 14], "decode's 0.48 is not low"),
        ([9, 9], [1], "the last one stays"),
        ([9, 9], [8, 8], "0.36 each would be 0.72 of one; high is 0.7 here"),
    ],
)
def test_no_instance_moves(waits, batches, why):
    conductor = make(len(waits), len(batches))
    conductor.cluster.free_at_s[: len(waits)] = waits
    conductor.cluster.batch_size[len(waits) :] = batches
    high = 0.7 if "0.7 here" in why else 0.8
    assert advise(conductor, RoleAdvisor(high=high)) is None, why


def test_moves_are_separated_by_the_cooldown():
    conductor, advisor = make(2, 3), RoleAdvisor(cooldown_s=30)
    conductor.cluster.free_at_s[:2] = 100
    assert advise(conductor, advisor, now_s=5.0) is not None
    assert advise(conductor, advisor, now_s=34.0) is None
    assert advise(conductor, advisor, now_s=35.0) is not None


def test_bad_arguments_are_rejected():
    with pytest.raises(InvalidArgument, match="low must be below high, got 0.9 and 0.8"):
        RoleAdvisor(low=0.9)
    with pytest.raises(InvalidArgument, match="min_instances must be at least 1, got 0"):
        RoleAdvisor(min_instances=0)
